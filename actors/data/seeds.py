"""Seeds the generators of a process that reads rows, so that what draws from them depends on the number of the row alone."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(*key: int) -> None:
    """Seed the generators of Python, NumPy and torch by some numbers."""
    python, numpy, of_torch = (int(word) for word in np.random.SeedSequence(key).generate_state(3))
    random.seed(python)
    np.random.seed(numpy)
    torch.manual_seed(of_torch)
