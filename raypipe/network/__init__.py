"""What is known of a network, and how it is found out: rounds of measurements, fits, shared links, clocks, running estimates.

Everything here is computed from figures that others have measured: no ray, no torch.
"""
