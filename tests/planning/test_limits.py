"""What limits cost."""

from __future__ import annotations

import pytest

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.planning.limits import without_interactions, without_limits
from raypipe.planning.plan import plan
from tests.planning.towers import node, towers


def planned(profile: ModelProfile, topology: ClusterTopology) -> Plan:
    return plan(profile, topology, 8, schedule="1f1b", effort=0.1)


@pytest.mark.parametrize(
    ("topology", "limits"),
    [
        (node(1), set()),
        (node(2), {"transfers"}),
        (node(2, memory_bytes=10**9), {"transfers", "memory"}),
    ],
)
def test_only_limits_that_there_are_are_lifted(topology: ClusterTopology, limits: set[str]) -> None:
    found = planned(towers((1.0, 1.0), num_layers=4), topology)
    assert {without.limit for without in without_limits(found, planned)} == limits


def test_each_limit_costs_what_a_plan_without_it_saves() -> None:
    profile = towers((1.0, 1.0), num_layers=4, exchanges=2, kilobytes=100_000, saved_bytes=10**8)
    topology = node(2, memory_bytes=4_000_000_000, bandwidth_bytes_per_s=1e4)
    found = planned(profile, topology)
    assert found.predicted is not None
    without = {one.limit: one.update_s for one in without_limits(found, planned)}
    assert without.keys() == {"memory", "transfers", "interactions"}
    assert without["transfers"] < 0.9 * found.predicted.update_s
    assert all(update_s <= found.predicted.update_s for update_s in without.values())


def test_a_plan_that_is_not_found_again_costs_nothing() -> None:
    found = planned(towers((1.0, 1.0), num_layers=4), node(2))
    slower = plan(towers((1.0, 2.0), num_layers=4), node(2), 8, schedule="1f1b", effort=0.1)
    assert found.predicted is not None
    assert [one.update_s for one in without_limits(found, lambda *_: slower)] == [found.predicted.update_s]


def test_branches_without_interactions_meet_only_behind() -> None:
    apart = without_interactions(towers((1.0, 1.0), num_layers=4, exchanges=2))
    assert apart is not None
    assert set(apart.edges()) == {edge for edge in apart.edges() if edge.consumer == 8 or (edge.producer - edge.consumer) % 2 == 0}
    assert without_interactions(apart) is None
