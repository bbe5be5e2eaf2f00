"""Drawings of schedules, plans and traces."""
