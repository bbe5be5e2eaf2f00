"""Runs: trains a model, or rehearses its plan, on a cluster."""
