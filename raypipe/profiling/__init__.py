"""Measures what layers and machines cost, and imports profiles that others measured."""
