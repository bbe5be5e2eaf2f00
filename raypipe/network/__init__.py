"""Mathematics of a network's measurements: rounds, fits, shared links, clocks and running estimates; no ray, no torch."""
