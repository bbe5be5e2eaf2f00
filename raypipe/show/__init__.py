"""Drawings of schedules, traces, topologies, plans and profiles: text for terminals, SVG for files."""
