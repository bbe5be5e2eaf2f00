"""How steep a loss may be where gradients are late: the largest learning rate times curvature at which training is stable.

    python benchmarks/staleness.py

In one direction of curvature c, as Adam's second moment scales it, a gradient is c x. Of each update a share s of the microbatches
read the weights before the last ones: all of them with a delay of one update, those of the first of K rounds with AMDP (s = 1/K).
With the first moment's decay b the weights follow

    AdamW    x' = x - r m                           m = b m_before + (1 - b) g         g = c ((1 - s) x + s x_before)
    NAdamW   x' = x - r (b m + (1 - b) g)

With a look-ahead L, x' - x is (1 + L s) times that step less L s times the one before; a gradient correction C is the same for g, and in
one direction has the same effect. The weights stay bounded while no root of the characteristic polynomial is outside the unit circle.
Printed is the largest r c. Without delay AdamW's is 2 (1 + b) / (1 - b) (Cohen et al. 2022, arXiv 2207.14484); with a delay of one update
it is 1, whatever b is.
"""

from __future__ import annotations

import math

import numpy as np
from rounds import print_table

BETAS = (0.0, 0.9, 0.95, 0.99)
ROUNDS = (math.inf, 16, 8, 4, 2, 1)
CORRECTIONS = (0.0, 0.5, 1.0)
_OUTSIDE = 1e-9
_HALVINGS = 60


def largest_stable(beta: float, share: float, *, looks_ahead: bool, correction: float = 0.0) -> float:
    """The largest learning rate times curvature.

    Args:
        beta: decay of the first moment.
        share: of the microbatches, whose gradients are one update late.
        looks_ahead: NAdamW instead of AdamW.
        correction: look-ahead or gradient correction.
    """
    # In z, by which the weights grow in an update, times z cubed: (z - 1)(1 - b/z) + a (1 + ahead - ahead/z)(1 - s + s/z)(1 + L s - L s/z).
    ahead = beta if looks_ahead else 0.0
    without = np.polymul(np.polymul([1, -1], [1, -beta]), [1, 0, 0])
    gradient = np.polymul(np.polymul([1 + ahead, -ahead], [1 - share, share]), [1 + correction * share, -correction * share])
    low, high = 0.0, 10.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if np.abs(np.roots(np.polyadd(without, middle * gradient))).max() <= 1 + _OUTSIDE:
            low = middle
        else:
            high = middle
    return low / (1 - beta)


def main() -> None:
    rows = [
        {
            "optimizer": name,
            "beta1": f"{beta:g}",
            "L or C": f"{correction:g}",
            **{
                "no delay" if rounds == math.inf else f"K = {rounds}": (
                    f"{largest_stable(beta, 1 / rounds, looks_ahead=ahead, correction=correction):.1f}"
                )
                for rounds in ROUNDS
            },
        }
        for name, ahead in (("adamw", False), ("nadamw", True))
        for correction in CORRECTIONS
        for beta in BETAS
    ]
    print_table("largest stable learning rate times curvature", rows)


if __name__ == "__main__":
    main()
