"""The buckets of all runs of layers are those of each run alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.communication.buckets import LEAST_BUCKET_BYTES, num_buckets
from raypipe.planning.late_sums import LateSums
from raypipe.schedules.ir import OpKind
from raypipe.simulation.cost import LayerCost, StageCost

LAYERS = st.lists(st.tuples(st.sampled_from([0, 1, 3, 10]), st.integers(1, 5), st.integers(0, 1)), min_size=1, max_size=10)


@given(layers=LAYERS, sum_s=st.floats(0.1, 50.0))
def test_estimates_see_the_buckets_that_the_simulator_sees(layers: list[tuple[int, int, int]], sum_s: float) -> None:
    costs = [
        LayerCost(size * LEAST_BUCKET_BYTES // 3, untouched * size * LEAST_BUCKET_BYTES // 6, float(backward_s), 0.0)
        for size, backward_s, untouched in layers
    ]

    def before(values: list[float]) -> np.ndarray:
        return np.concatenate(([0.0], np.cumsum(values)))

    late = LateSums.of(
        trained_bytes=before([float(cost.gradient_bytes) for cost in costs]),
        summed_bytes=before([float(cost.gradient_bytes - cost.untouched_bytes) for cost in costs]),
        backward_s=before([cost.backward_s for cost in costs]),
    )
    for first, end in itertools.combinations(range(len(costs) + 1), 2):
        stage_layers = tuple(costs[first:end])
        trained, untouched = (sum(getattr(cost, name) for cost in stage_layers) for name in ("gradient_bytes", "untouched_bytes"))
        backward_s = sum(cost.backward_s for cost in stage_layers)
        stage = StageCost(0.0, backward_s, 0.0, parameter_bytes=trained, untouched_bytes=untouched, layers=stage_layers)
        count = num_buckets(tuple(cost.gradient_bytes for cost in stage_layers))
        shares = [stage.bucket_bytes(part, count) / max(stage.summed_bytes, 1) for part in range(1, count + 1)]
        ends_s = 0.0
        for ready, share in zip(stage.ready(OpKind.BACKWARD, count), shares, strict=True):
            ends_s = max(ends_s, ready * backward_s) + share * sum_s
        expected_s = ends_s - backward_s if stage.summed_bytes else None
        if expected_s is not None:
            assert late.late_of(first, end, sum_s, backward_s) == pytest.approx(expected_s)
            whole = np.full((len(costs) + 1,) * 2, sum_s)
            assert late.late_s(whole, np.full_like(whole, backward_s))[first, end] == pytest.approx(expected_s)
