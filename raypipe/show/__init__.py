"""Drawings as text, SVG and HTML."""
