"""Runs a device's lowered program."""
