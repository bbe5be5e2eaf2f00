"""Planners: from a profile, a topology and a number of microbatches to a plan."""
