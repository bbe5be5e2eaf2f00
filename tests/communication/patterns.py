"""Patterns of each kind."""

from __future__ import annotations

from dataclasses import replace

from raypipe.communication.patterns import Pattern, Tree, direct, ring, tree

PATTERNS = [
    ring(range(2)),
    ring(range(5)),
    ring((0, 2, 1, 3)),
    direct(range(2)),
    direct((0, 3, 1, 2)),
    Pattern(((0, 1), (2, 3))),
    Pattern(((0, 1), (2, 3)), direct=True),
    Pattern(((0, 2, 4), (1,), (3, 5))),
    Pattern(((0, 2, 4), (1,), (3, 5)), direct=True),
    Pattern(((0, 1, 2, 3),)),
    tree(((0, 2), (1, 2), (1, 3))),
    tree(((0, 1), (0, 2), (0, 3))),
    replace(
        ring(range(4)),
        trees=(Tree(((0, 1), (0, 2), (0, 3)), 0, 5), Tree(((0, 1), (1, 2), (2, 3)), 2, 3), Tree(((0, 2), (1, 2), (1, 3)), 2, 1)),
    ),
]
