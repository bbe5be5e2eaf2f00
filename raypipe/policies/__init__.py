"""Policies: they take facts and return decisions; only the coordinator acts."""
