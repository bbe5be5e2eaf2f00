"""What `benchmarks/branches.py` compares with."""

from __future__ import annotations

import itertools

from branches import Case, Systems

from raypipe.planning.layout import Layout


def test_orders_for_a_listed_chain_wait_for_the_branch_before() -> None:
    systems = Systems(Case(4, "1:1", "microbatch", latency=1.0))
    assert list(systems.as_chain.problem.edges) == list(itertools.pairwise(range(systems.problem.num_layers)))
    equal = Layout((0, 8, 16, 24, 33), systems.workers, "zb-h2")
    in_order, at_once = systems.as_chain.simulate(equal), systems.evaluator.simulate(equal)
    assert in_order is not None
    assert at_once is not None
    assert in_order.update_s > at_once.update_s


def test_more_orders_and_more_freedom_are_never_slower() -> None:
    found = Systems(Case(2, "1:1", "microbatch", latency=1.0)).best()
    seconds = [found[name].update_s for name in ("branches", "chain", "listed", "variants", "chimera", "equal")]
    assert seconds == sorted(seconds)
    assert seconds[2] < seconds[3]


def test_devices_that_share_the_rows_of_a_branch_are_never_idle_without_sums() -> None:
    for loss in ("microbatch", "coupled"):
        found = Systems(Case(4, "1:1", loss, latency=0.0)).distmm()
        assert found is not None
        assert found.update_s == 2 * 8 * 3
