"""Mathematics of a network's measurements; no ray, no torch."""
