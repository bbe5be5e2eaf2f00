"""What commands exchange: profiles, topologies, schedules, plans and traces, each with one file format."""
