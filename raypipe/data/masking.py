"""The tokens that a masked language model predicts, and its input instead: a pure function of seed and sample number.

Of a row of T tokens, round(0.15 T) are chosen, at least one; 80 % of them are replaced by the mask, 10 % by any token, and 10 % stay
(Devlin et al. 2019, arXiv 1810.04805, appendix A.1). As in the authors' code the number is the same in every row, so that the mean
loss of an update does not depend on how its rows are divided into microbatches. Each epoch masks a row anew.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NO_TARGET = -100
"""The target of a position that is not to be told: what torch's cross entropy leaves out."""

_CHOSEN = 0.15
_MASKED = 0.8
_RANDOM = 0.1
_STREAM = 15
"""Tells these random numbers from those that shuffle, `raypipe.data.tokens.permutation`, under the same seed."""


def num_masked(num_tokens: int) -> int:
    """Return the number of tokens per row that are to be predicted."""
    return max(1, round(_CHOSEN * num_tokens))


def mask_rows(
    tokens_BT: npt.NDArray[np.int64], *, first: int, seed: int, vocabulary_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the inputs and the targets of a model, both [B, T].

    The mask is the token `vocabulary_size`; where nothing is predicted, the target is `NO_TARGET`.

    Args:
        tokens_BT: Rows of tokens.
        first: Number of the first row among all samples.
        seed: Seed, zero or more.
        vocabulary_size: Number of tokens without the mask.
    """
    num_rows, num_tokens = tokens_BT.shape
    # The raw output, as in `permutation`: numpy keeps this stream across its versions.
    raw_B3T = np.stack([np.random.PCG64([seed, sample, _STREAM]).random_raw((3, num_tokens)) for sample in range(first, first + num_rows)])
    order_BT, kinds_BT, random_BT = raw_B3T.transpose(1, 0, 2)
    chosen_BC = np.argsort(order_BT, axis=1, kind="stable")[:, : num_masked(num_tokens)]
    kinds_BC = np.take_along_axis(kinds_BT, chosen_BC, 1) / 2.0**64
    random_BC = (np.take_along_axis(random_BT, chosen_BC, 1) % vocabulary_size).astype(np.int64)
    told_BC = np.take_along_axis(tokens_BT, chosen_BC, 1)
    seen_BC = np.where(kinds_BC < _MASKED, vocabulary_size, np.where(kinds_BC < _MASKED + _RANDOM, random_BC, told_BC))
    inputs_BT, targets_BT = tokens_BT.copy(), np.full_like(tokens_BT, NO_TARGET)
    np.put_along_axis(inputs_BT, chosen_BC, seen_BC, 1)
    np.put_along_axis(targets_BT, chosen_BC, told_BC, 1)
    return inputs_BT, targets_BT
