"""Shares of a microbatch that are, or are not, whole rows; links that a plan uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink
from raypipe.config import OptimizerConfig, Transport
from raypipe.errors import NoLinkError, PlanError
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.schedules.lower import Placement
from raypipe.training.checks import check_links, check_rows, late_remedy, least_rows


def shared(*shares: float) -> Placement:
    return Placement((tuple(enumerate(shares)),))


@pytest.mark.parametrize(("shares", "num_rows"), [((1.0,), 1), ((0.5, 0.5), 2), ((1 / 3, 2 / 3), 6), ((0.1, 0.2, 0.7), 10)])
def test_shares_of_whole_rows_are_taken(shares: tuple[float, ...], num_rows: int) -> None:
    check_rows(shared(*shares), num_rows)


@pytest.mark.parametrize(
    ("shares", "num_rows", "problem"),
    [
        (
            (0.5, 0.5),
            5,
            "2.5, 2.5 rows, which cannot be cut; the nearest that work: 3/5, 2/5; or a microbatch_size that is a multiple of 2",
        ),
        ((1 / 3, 2 / 3), 8, "the nearest that work: 3/8, 5/8; or a microbatch_size that is a multiple of 3"),
        ((0.9, 0.1), 4, "the nearest that work: 3/4, 1/4"),
        ((0.25,) * 4, 3, "worker 0 has 4 devices for microbatches of 3 rows; use a microbatch_size of at least 4"),
    ],
)
def test_shares_that_cut_rows_are_refused_with_shares_that_work(shares: tuple[float, ...], num_rows: int, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_rows(shared(*shares), num_rows)
    assert problem in str(caught.value)


@given(weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), num_rows=st.integers(1, 40))
def test_the_shares_that_are_proposed_work(weights: list[float], num_rows: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    shares[-1] = 1 - sum(shares[:-1])
    try:
        check_rows(shared(*shares), num_rows)
    except PlanError as error:
        if "cannot be cut" in str(error):
            proposed = str(error).partition("that work: ")[2].partition(";")[0].split(", ")
            rows = [int(part.partition("/")[0]) for part in proposed]
            assert sum(rows) == num_rows
            check_rows(shared(*(count / num_rows for count in rows)), num_rows)


def test_the_fewest_rows_are_those_of_which_all_boundaries_are_whole() -> None:
    assert least_rows([0.0, 1 / 3, 0.5, 1.0], most=12) == 6
    assert least_rows([0.0, 1.0], most=12) == 1
    assert least_rows([0.0, 1 / 3, 0.5, 1.0], most=4) == 4


# Links


def planned(layout: Layout, links: Sequence[tuple[str, str]], *, kind: str = "cpu") -> Plan:
    """A plan for four linked nodes of one device, with a topology of these links."""
    nodes = tuple(Node(name=name, devices=(Device(f"{name}/0", kind),)) for name in "abcd")
    full = ClusterTopology(name="full", nodes=nodes, default_link=NodeLink(latency_s=1e-4, bandwidth_bytes_per_s=1e9))
    profile = ModelProfile.uniform(4, output_bytes=1000, parameter_bytes=1000, microbatch_size=8)
    evaluator = LayoutEvaluator(Problem(profile, full, 4, 8))
    found = evaluator.simulate(layout)
    assert found is not None
    plan = evaluator.plan(found, planner="given", lower_bound_s=0.0)
    some = tuple(Link(source=one, target=other, bandwidth_bytes_per_s=1e9, latency_s=1e-4) for one, other in links)
    return replace(plan, topology=replace(full, default_link=None, links=some))


CHAIN = Layout((0, 1, 2, 3, 4), ((0,), (1,), (2,), (3,)))
COPIES = Layout((0, 2, 4), ((0, 1, 2), (3,)))
RING = (("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"))


def test_a_pipeline_over_links_alone_is_taken() -> None:
    # Gradient norms, which all devices exchange, go along the links.
    check_links(planned(CHAIN, RING), Transport.AUTO)


def test_messages_over_a_missing_pair_are_refused() -> None:
    with pytest.raises(NoLinkError, match=r"'b/0'.*'c/0'|'c/0'.*'b/0'"):
        check_links(planned(CHAIN, [("a", "b"), ("a", "c"), ("c", "d"), ("a", "d")]), Transport.AUTO)


def test_sums_over_a_missing_pair_go_along_the_links_by_tcp_alone() -> None:
    plan = planned(COPIES, [("a", "b"), ("b", "c"), *((one, "d") for one in "abc")])
    check_links(plan, Transport.AUTO)
    with pytest.raises(NoLinkError, match=r"gloo.*scaling.transport to tcp"):
        check_links(plan, Transport.GLOO)
    gpus = planned(COPIES, [("a", "b"), ("b", "c"), *((one, "d") for one in "abc")], kind="nvidia-h200")
    with pytest.raises(NoLinkError, match=r"NCCL.*route"):
        check_links(gpus, Transport.AUTO)


def test_sums_of_devices_that_no_links_join_are_refused() -> None:
    with pytest.raises(NoLinkError, match="do not join"):
        check_links(planned(Layout((0, 4), ((0, 1, 2),)), [("a", "b"), ("c", "d")]), Transport.TCP)


@pytest.mark.parametrize(
    ("optimizer", "mean_delay", "remedy"),
    [
        (OptimizerConfig(), 0.2, "optimizer.name nadamw"),
        (OptimizerConfig(name="nadamw"), 0.2, ""),
        (OptimizerConfig(), 1.0, "optimizer.name muon, optimizer.gradient_correction 1"),
        (OptimizerConfig(name="muon"), 1.0, "optimizer.gradient_correction 1"),
        (OptimizerConfig(lookahead=1.0), 1.0, ""),
    ],
)
def test_late_gradients_have_a_remedy(optimizer: OptimizerConfig, mean_delay: float, remedy: str) -> None:
    assert late_remedy(optimizer, mean_delay) == remedy
