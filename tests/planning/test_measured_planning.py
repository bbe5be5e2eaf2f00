"""The planning cases of measured clusters are complete and can be planned within memory."""

from __future__ import annotations

import pytest
from measured_clusters import DATA
from measured_planning import CASES

from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.solve import solve
from raypipe.profiling.sailor import SailorData

SAILOR = SailorData(DATA)


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_times_and_memory_of_all_its_gpus(name: str) -> None:
    problem = CASES[name].problem(SAILOR)
    assert {device.kind for device in problem.topology.devices} <= problem.profile.device_kinds.keys()
    assert all(device.memory_bytes for device in problem.topology.devices)
    # Weights, gradients and the optimizer's state alone fill no more than all devices.
    assert 4 * sum(layer.parameter_bytes for layer in problem.profile.layers) < sum(problem.memory_bytes)


def test_one_node_a_stage_fits_opt_30b_into_eight_nodes() -> None:
    evaluator = LayoutEvaluator(CASES["OPT-30B, 8 A100 nodes"].problem(SAILOR))
    found = solve(evaluator, name="node-pipeline", schedule="1f1b")
    assert not found.missing_bytes
    assert len(found.layout.workers) == 8
