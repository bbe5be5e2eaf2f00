"""An estimate follows its link: slowly where it drifts, at once where it jumps, and not at all where there is only noise."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, SharedLink
from raypipe.network.estimate import LinkEstimate, NetworkEstimate, Transfer

LATENCY_S = 2e-4
NUM_BYTES = 200_000


def transfer_s(bandwidth: float, source: random.Random, *, noise: float, outliers: float = 0.0) -> float:
    seconds = LATENCY_S + NUM_BYTES / bandwidth * math.exp(source.gauss(0, noise))
    return seconds * (3 if source.random() < outliers else 1)


def feed(estimate: LinkEstimate, bandwidth: float, count: int, source: random.Random, *, noise: float, outliers: float = 0.0) -> list[int]:
    """Observes so many transfers; returns at which of them a change was seen."""
    return [
        number
        for number in range(count)
        if estimate.observe(NUM_BYTES, transfer_s(bandwidth, source, noise=noise, outliers=outliers), at_s=float(estimate.num_transfers))
    ]


@given(seed=st.integers(0, 10_000), noise=st.floats(0.0, 0.3))
def test_noise_alone_shows_no_change(seed: int, noise: float) -> None:
    estimate = LinkEstimate(LATENCY_S)
    assert feed(estimate, 1e7, 600, random.Random(seed), noise=noise, outliers=0.02) == []
    assert estimate.bandwidth_bytes_per_s == pytest.approx(1e7, rel=0.03 + 1.2 * noise)


@given(
    seed=st.integers(0, 10_000),
    noise=st.floats(0.01, 0.15),
    factor=st.sampled_from([0.1, 0.25, 0.5, 2.0, 4.0, 10.0]),
    before=st.integers(6, 300),
)
def test_a_step_is_followed_within_twenty_transfers(seed: int, noise: float, factor: float, before: int) -> None:
    source, estimate = random.Random(seed), LinkEstimate(LATENCY_S)
    feed(estimate, 1e7, before, source, noise=noise)
    seen = feed(estimate, 1e7 * factor, 20, source, noise=noise)
    assert estimate.bandwidth_bytes_per_s == pytest.approx(1e7 * factor, rel=0.1 + noise)
    if factor not in {0.5, 2.0}:  # which a young estimate, that still expects noise, may take for a drift
        assert seen


@given(seed=st.integers(0, 10_000))
def test_a_drift_is_followed_without_a_step(seed: int) -> None:
    source, estimate = random.Random(seed), LinkEstimate(LATENCY_S)
    for number in range(1000):
        bandwidth = 1e7 * 2 ** (number / 1000)
        estimate.observe(NUM_BYTES, transfer_s(bandwidth, source, noise=0.05), at_s=float(number))
    assert estimate.bandwidth_bytes_per_s == pytest.approx(2e7, rel=0.1)


@given(seed=st.integers(0, 10_000))
def test_what_a_shaper_lets_pass_in_a_burst_does_not_make_a_link_faster(seed: int) -> None:
    source, estimate = random.Random(seed), LinkEstimate(LATENCY_S)
    sizes = [600_000] * 40 + [100_000, 100_000, 600_000] * 70  # as when what passes the link waits for a slower one
    for number, size in enumerate(sizes):
        seconds = LATENCY_S + (size - 16_000) / 25e6 * math.exp(source.gauss(0, 0.02))
        assert not estimate.observe(size, seconds, at_s=float(number))
    assert estimate.bandwidth_bytes_per_s == pytest.approx(25e6, rel=0.1)


def test_the_first_transfer_gives_an_estimate() -> None:
    estimate = LinkEstimate(LATENCY_S)
    assert estimate.bandwidth_bytes_per_s is None
    estimate.observe(NUM_BYTES, LATENCY_S + NUM_BYTES / 1e7, at_s=1.0)
    assert estimate.bandwidth_bytes_per_s == pytest.approx(1e7)


@given(seconds=st.floats(0.0, 1e6), num_bytes=st.integers(1, 10**12))
def test_no_transfer_makes_a_bandwidth_that_is_none(seconds: float, num_bytes: int) -> None:
    estimate = LinkEstimate(LATENCY_S)
    for number in range(40):
        estimate.observe(num_bytes, seconds, at_s=float(number))
        bandwidth = estimate.bandwidth_bytes_per_s
        assert bandwidth is not None
        assert 0 < bandwidth < math.inf


def test_what_a_probe_measured_replaces_what_was_seen() -> None:
    source, estimate = random.Random(1), LinkEstimate()
    feed(estimate, 1e7, 50, source, noise=0.1)
    estimate.set(bandwidth_bytes_per_s=3e7, latency_s=LATENCY_S, at_s=77.0)
    assert estimate.bandwidth_bytes_per_s == pytest.approx(3e7)
    assert estimate.seen_at_s == 77.0
    assert feed(estimate, 3e7, 100, source, noise=0.1) == []


# Networks


def topology() -> ClusterTopology:
    return ClusterTopology(
        name="pair",
        nodes=tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in "abc"),
        links=(
            Link(source="a", target="b", bandwidth_bytes_per_s=1e6, latency_s=1e-3),
            Link(source="a/0", target="c/0", bandwidth_bytes_per_s=5e6, latency_s=2e-3),
        ),
        default_link=NodeLink(bandwidth_bytes_per_s=9e6, latency_s=3e-3),
    )


def test_a_snapshot_has_the_current_bandwidths_and_the_known_latencies() -> None:
    network = NetworkEstimate("abc")
    network.observe(Transfer("a", "b", 1_000_000, 0.5, at_s=float(number)) for number in range(5))
    network.observe([Transfer("c", "b", 1_000_000, 0.25, at_s=9.0)])
    now = network.snapshot(topology())
    assert now.path("a/0", "b/0").bandwidth_bytes_per_s == pytest.approx(2e6)
    assert now.path("a/0", "b/0").latency_s == 1e-3
    assert now.path("b/0", "a/0").bandwidth_bytes_per_s == 1e6
    assert now.path("c/0", "b/0").bandwidth_bytes_per_s == pytest.approx(4e6)
    assert now.path("c/0", "b/0").latency_s == 3e-3
    assert now.path("b/0", "c/0").bandwidth_bytes_per_s == 9e6
    assert now.path("a/0", "c/0").bandwidth_bytes_per_s == 5e6, "links between devices stay as they are"


def test_a_snapshot_has_the_latency_that_a_probe_found() -> None:
    network = NetworkEstimate("abc")
    network.seed(topology())
    network.links["a", "b"].set(bandwidth_bytes_per_s=3e6, latency_s=0.05, at_s=1.0)
    now = network.snapshot(topology())
    assert (now.path("a/0", "b/0").latency_s, now.path("b/0", "a/0").latency_s) == (0.05, 1e-3)


def test_nodes_may_be_called_otherwise_in_the_topology() -> None:
    network = NetworkEstimate(["10.0.0.1", "10.0.0.2"])
    names = {"10.0.0.1": "a", "10.0.0.2": "b"}
    network.seed(topology(), names=names, at_s=5.0)
    assert network.links["10.0.0.1", "10.0.0.2"].bandwidth_bytes_per_s == pytest.approx(1e6)
    assert network.links["10.0.0.1", "10.0.0.2"].latency_s == 1e-3
    network.links["10.0.0.2", "10.0.0.1"].set(bandwidth_bytes_per_s=7e6, latency_s=1e-3, at_s=6.0)
    assert network.snapshot(topology(), names=names).path("b/0", "a/0").bandwidth_bytes_per_s == pytest.approx(7e6)


TWO_EACH = tuple(Node(name=name, devices=(Device(f"{name}0", "cpu"), Device(f"{name}1", "cpu"))) for name in "ab")
ONE_EACH = tuple(replace(node, devices=node.devices[:1]) for node in TWO_EACH)


def link(source: str, target: str, bandwidth: float | None, latency_s: float) -> Link:
    return Link(source=source, target=target, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)


def figures(topology: ClusterTopology) -> dict[tuple[str, str], tuple[float, float]]:
    """Bandwidth and latency of each pair of devices of different nodes, rounded."""
    pairs = [(a.name, b.name) for a in topology.devices for b in topology.devices if topology.node_of(a.name) != topology.node_of(b.name)]
    paths = {pair: topology.path(*pair) for pair in pairs}
    return {pair: (float(f"{path.bandwidth_bytes_per_s:.6g}"), path.latency_s) for pair, path in paths.items()}


@pytest.mark.parametrize(
    ("nodes", "links"),
    [
        (TWO_EACH, (link("a0", "b0", 1e9, 1e-5), link("a1", "b1", 1e7, 1e-3))),
        (TWO_EACH, (link("a0", "b", 1e9, 1e-5),)),
        (TWO_EACH, (link("a", "b1", 1e9, 1e-5), link("a", "b", 1e7, 1e-3))),
        (ONE_EACH, (link("a0", "b", 1e9, 1e-5),)),
        (ONE_EACH, (link("a0", "b0", 1e9, 1e-5), link("a", "b", 1e7, 1e-3))),
        (ONE_EACH, (link("a0", "b0", None, 1e-5),)),
    ],
)
def test_where_nothing_was_seen_a_snapshot_changes_nothing(nodes: tuple[Node, ...], links: tuple[Link, ...]) -> None:
    begun = ClusterTopology(name="t", nodes=nodes, links=links, default_link=NodeLink(bandwidth_bytes_per_s=1e8, latency_s=1e-4))
    network = NetworkEstimate("ab")
    network.seed(begun)
    assert figures(network.snapshot(begun)) == figures(begun)


def test_links_that_tell_several_devices_of_a_node_apart_stay_as_they_are() -> None:
    rails = ClusterTopology(
        name="rails", nodes=TWO_EACH, links=(link("a0", "b0", 1e9, 1e-5), link("a1", "b1", 1e7, 1e-3), link("a", "b", 1e6, 0.0))
    )
    network = NetworkEstimate("ab")
    network.seed(rails)
    network.observe(Transfer("a", "b", 1_000_000, 0.5, at_s=float(number)) for number in range(20))
    assert network.snapshot(rails) == rails


def test_the_link_of_two_devices_alone_on_their_nodes_is_followed() -> None:
    begun = ClusterTopology(name="t", nodes=ONE_EACH, links=(link("a0", "b0", 1e9, 1e-5),), default_link=NodeLink(latency_s=0.1))
    network = NetworkEstimate("ab")
    network.seed(begun)
    network.observe(Transfer("a", "b", 1_000_000, 0.1 + 1e-5, at_s=float(number)) for number in range(20))
    now = network.snapshot(begun)
    assert now.path("a0", "b0").bandwidth_bytes_per_s == pytest.approx(1e7, rel=0.01)
    assert (now.path("a0", "b0").latency_s, now.path("b0", "a0").latency_s) == (1e-5, 1e-5)


def test_the_latency_of_a_link_without_limit_is_counted_once() -> None:
    begun = ClusterTopology(name="t", nodes=ONE_EACH, links=(link("a", "b", None, 0.01),))
    network = NetworkEstimate("ab")
    network.seed(begun)
    network.observe(Transfer("a", "b", 100_000, 0.01 + 0.005, at_s=float(number)) for number in range(20))
    path = network.snapshot(begun).path("a0", "b0")
    assert path.latency_s == 0.01
    assert path.bandwidth_bytes_per_s == pytest.approx(100_000 / 0.005)


def switched(shared: float, link: float) -> ClusterTopology:
    """Three nodes; what leaves the first shares its network card."""
    return ClusterTopology(
        name="t",
        nodes=tuple(Node(name=name, devices=(Device(f"{name}0", "cpu"),)) for name in "abc"),
        default_link=NodeLink(bandwidth_bytes_per_s=link, latency_s=0.0),
        shared_links=(SharedLink(name="card", bandwidth_bytes_per_s=shared, members=(("a", "b"), ("a", "c"))),),
    )


def after(topology: ClusterTopology, **bandwidths: float) -> ClusterTopology:
    """The topology after transfers between nodes whose names are the two letters of each keyword."""
    network = NetworkEstimate("abc")
    network.seed(topology)
    for pair, bandwidth in bandwidths.items():
        network.observe(Transfer(pair[0], pair[1], 1_000_000, 1_000_000 / bandwidth, at_s=float(number)) for number in range(40))
    return network.snapshot(topology)


def card(topology: ClusterTopology) -> float:
    (shared,) = topology.shared_links
    return shared.bandwidth_bytes_per_s


@pytest.mark.parametrize(("shared", "link"), [(1e8, 1e8), (1e8, 1e10), (1e9, 1e8)])
def test_what_is_shared_stays_where_nothing_was_seen(shared: float, link: float) -> None:
    begun = switched(shared, link)
    assert after(begun).shared_links == begun.shared_links
    assert figures(after(begun)) == figures(begun)


def test_a_link_begins_with_what_it_reaches_through_its_bottleneck() -> None:
    network = NetworkEstimate("abc")
    network.seed(switched(1e8, 1e10))
    assert network.links["a", "b"].bandwidth_bytes_per_s == pytest.approx(1e8)
    assert network.links["b", "a"].bandwidth_bytes_per_s == pytest.approx(1e10)
    assert network.observe(Transfer("a", "b", 1_000_000, 0.01, at_s=float(number)) for number in range(40)) == []


def test_what_limits_its_links_alone_follows_the_fastest_of_them() -> None:
    assert card(after(switched(1e8, 1e10), ab=1e9)) == pytest.approx(1e9, rel=0.05)
    assert card(after(switched(1e8, 1e8), ab=2e7)) == pytest.approx(1e8), "the other link was not seen to be slower"
    assert card(after(switched(1e8, 1e8), ab=2e7, ac=2e7)) == pytest.approx(2e7, rel=0.05)


def test_a_port_falls_with_the_links_that_are_used_whatever_was_known_of_the_others() -> None:
    begun = ClusterTopology(
        name="t",
        nodes=tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in "abcd"),
        default_link=NodeLink(latency_s=0.0),
        shared_links=(SharedLink(name="port", bandwidth_bytes_per_s=1e8, members=(("a", "b"), ("a", "c"), ("a", "d"))),),
    )
    network = NetworkEstimate("abcd")
    network.seed(begun)

    def pass_over(rates: dict[str, float], since_s: float) -> float:
        network.observe(
            Transfer("a", target, 1_000_000, 1_000_000 / rate, at_s=since_s + number)
            for number in range(20)
            for target, rate in rates.items()
        )
        return card(network.snapshot(begun))

    assert pass_over({"b": 4e7, "c": 4e7}, 0.0) == pytest.approx(4e7, rel=0.05)
    assert pass_over({"b": 1e8, "c": 1e8, "d": 1e8}, 100.0) == pytest.approx(1e8, rel=0.05)
    assert pass_over({"b": 4e7}, 200.0) == pytest.approx(1e8, rel=0.05), "the link may have fallen alone"
    assert pass_over({"b": 4e7, "c": 4e7}, 300.0) == pytest.approx(4e7, rel=0.05)


def test_what_more_than_one_link_is_needed_to_fill_is_not_slower_because_they_are() -> None:
    assert card(after(switched(1e9, 4e8), ab=1e8, ac=1e8)) == 1e9
    assert card(after(switched(1e9, 4e8), ab=3e9)) == pytest.approx(3e9, rel=0.05)


def test_a_bottleneck_of_some_devices_of_a_node_makes_links_contend_and_limits_no_others() -> None:
    root = SharedLink(name="root", bandwidth_bytes_per_s=1e7, members=(("a0", "b"), ("b", "a")))
    begun = ClusterTopology(
        name="t", nodes=TWO_EACH, default_link=NodeLink(bandwidth_bytes_per_s=1e8, latency_s=1e-4), shared_links=(root,)
    )
    network = NetworkEstimate("ab")
    network.seed(begun)
    assert network.contending(("a", "b")) == {("b", "a")}
    assert figures(network.snapshot(begun)) == figures(begun)


def test_links_know_with_which_others_they_share_something() -> None:
    network = NetworkEstimate("abc")
    assert network.contending(("a", "b")) == set()
    network.seed(switched(1e8, 1e8))
    assert network.contending(("a", "b")) == {("a", "c")}
    assert network.contending(("b", "a")) == set()


def test_links_that_are_not_seen_grow_old() -> None:
    network = NetworkEstimate("abc", at_s=100.0)
    network.observe([Transfer("a", "b", 1_000_000, 0.5, at_s=130.0), Transfer("b", "a", 1_000_000, 0.5, at_s=110.0)])
    assert network.idle(now_s=150.0, older_than_s=60.0) == []
    assert network.idle(now_s=165.0, older_than_s=60.0) == [("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")]
    assert network.idle(now_s=200.0, older_than_s=60.0)[-2:] == [("b", "a"), ("a", "b")]
    assert network.age_s(("b", "a"), now_s=150.0) == 40.0


def test_a_change_names_its_link() -> None:
    network = NetworkEstimate("ab")
    assert network.observe([Transfer("a", "b", 1_000_000, 0.5, at_s=float(number)) for number in range(10)]) == []
    assert network.observe([Transfer("a", "b", 1_000_000, 2.0, at_s=float(number)) for number in range(10, 20)]) == [("a", "b")]


def test_one_node_has_no_links() -> None:
    assert NetworkEstimate(["a", "a"]).links == {}
