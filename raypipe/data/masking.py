"""The masked tokens that a model predicts (Devlin et al. 2019, arXiv 1810.04805, appendix A.1), by seed and sample number.

Of T tokens, round(0.15 T) are chosen, at least one: 80 % become the mask, 10 % any token, 10 % stay. The number is the same in each row,
so that the mean loss does not depend on the division into microbatches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NO_TARGET = -100
"""Target where nothing is predicted: what torch's cross entropy leaves out."""

_CHOSEN = 0.15
_MASKED = 0.8
_RANDOM = 0.1
_STREAM = 15  # tells these random numbers from those of `raypipe.data.samples.permutation` under the same seed


def num_masked(num_tokens: int) -> int:
    """Return the number of tokens per row that are to be predicted."""
    return max(1, round(_CHOSEN * num_tokens))


def mask_rows(
    tokens_BT: npt.NDArray[np.int64], *, first: int, seed: int, vocabulary_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the inputs and the targets of a model, both [B, T]; `first` is the sample number of the first row.

    The mask is the token `vocabulary_size`; where nothing is predicted, the target is `NO_TARGET`.
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
