"""Models that come with raypipe; the modules load torch."""
