"""What layers cost, and how thoroughly that is measured; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerMeasurement:
    """The cost of one layer for one microbatch. Seconds are lower quartiles.

    Attributes:
        weight_grad_s: Part of `backward_s` that can be deferred.
        split_s: What input and weight gradient apart take beyond `backward_s`: the graph is walked twice, and less stays in caches.
        saved_bytes: Bytes that autograd keeps for the backward, without weights.
        weight_grad_saved_bytes: Bytes kept between input and weight gradient, with the gradients that W starts from.
        parameter_bytes: Bytes of all weights as the optimizer steps them.
        update_s: Seconds of the optimizer's step and of renewing lower-precision copies.
        spread: Half the interquartile range of forward plus backward, divided by the median.
        working_bytes: Peak beyond `saved_bytes`: outputs, gradients, one gradient of a weight before it is added.
        input_grad_working_bytes: Peak of forward and input gradient beyond `saved_bytes`.
        gradient_rows: Rows of the looked-up weights that the microbatch touches.
        looked_up_rows: All rows of these weights; 0 where the layer looks none up.
        looked_up_bytes: Their bytes as the optimizer steps them.
        reread_share: As in `LayerProfile`, whatever the optimizer.
        state_bytes: Bytes that the optimizer keeps; `None` where none has stepped.
        fixed_share: Part of the seconds of forward and backward that does not depend on the number of rows; `None` if not measured.
    """

    name: str
    forward_s: float
    backward_s: float
    weight_grad_s: float
    output_bytes: int
    saved_bytes: int
    weight_grad_saved_bytes: int
    parameter_bytes: int
    tied_bytes: int
    update_s: float
    spread: float
    working_bytes: int
    input_grad_working_bytes: int
    low_precision_bytes: int = 0
    frozen_bytes: int = 0
    split_s: float = 0.0
    gradient_rows: int = 0
    looked_up_rows: int = 0
    looked_up_bytes: int = 0
    reread_share: float | None = None
    state_bytes: int | None = None
    fixed_share: float | None = None


@dataclass(frozen=True)
class Effort:
    """How often, how exactly and how long layers are measured.

    Attributes:
        repeats: Most timed runs of each layer in a pass.
        warm_up: Runs before these, for layers that are quick.
        passes: Passes over all layers: disturbances seldom hit a layer in two.
        spread: Spread of forward plus backward, as in `LayerMeasurement`, at which three timed runs or more are enough; 0 for never.
        most_s: Seconds of timed runs after which a layer has had enough of them; at least one is done.
        estimates: Whether one forward stands for all: a backward is taken for twice as long, half of it for the gradient of the weights.
    """

    repeats: int = 7
    warm_up: int = 2
    passes: int = 1
    spread: float = 0.0
    most_s: float = math.inf
    estimates: bool = False


USUAL_EFFORT = Effort(spread=0.03, most_s=3.0)  # about a second for a small model, so that it can precede every run
ESTIMATES = Effort(estimates=True)
LEAST_TIMED = 3
SLOW_S = 0.3  # a layer that has run for longer while its memory was measured is warm
