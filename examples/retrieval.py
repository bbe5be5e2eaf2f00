"""Measures how often the model of `examples/clip.yaml` finds a glyph's name among 1,000 names; no glyph of the face was trained on.

raypipe train examples/clip.yaml
python examples/retrieval.py runs/clip
"""

from __future__ import annotations

import torch
from trained import from_command_line

NUM_NAMES = 1000


def main() -> None:
    """Print the share of glyphs whose own name comes first, and among the first five."""
    trained = from_command_line("Retrieval of the names of glyphs.", function="raypipe.models.clip:clip")
    # A face has no name twice, and rows stand in the order of a hash, so that the names of each group are drawn by chance.
    firsts = range(0, trained.rows.num_rows - NUM_NAMES + 1, NUM_NAMES)
    ranked = []
    for first in firsts:
        outputs = [output for _, output in trained.outputs(first=first, count=NUM_NAMES)]
        images, names = torch.cat(outputs).unbind(1)
        best = (images @ names.T).topk(5, dim=1).indices
        ranked.append(best == torch.arange(NUM_NAMES).unsqueeze(1))
    hits = torch.cat(ranked).double().mean(0)
    print(f"{len(firsts) * NUM_NAMES} glyphs, each with {NUM_NAMES} names to choose from")
    print(f"own name first: {hits[0]:.1%} (by chance {1 / NUM_NAMES:.1%})")
    print(f"own name among the first five: {hits.sum():.1%} (by chance {5 / NUM_NAMES:.1%})")


if __name__ == "__main__":
    main()
