"""Planted bottlenecks are found, and none where there is none, from noisy rates of a network of fair flows."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.network.probe_budget import Budget, divide
from raypipe.network.rounds import Pair, Round, all_paired_rounds, matchings, one_to_all_rounds
from raypipe.network.sharing import Bottleneck, BottleneckSearch, below_their_ends, rates, shared_when_measured
from tests.network.max_min import Network


def search(network: Network, num_nodes: int) -> BottleneckSearch:
    found = BottleneckSearch(network.together)
    found.run(all_paired_rounds(matchings(num_nodes), num_nodes), one_to_all_rounds(num_nodes))
    return found


def all_pairs(num_nodes: int) -> list[Pair]:
    return list(itertools.permutations(range(num_nodes), 2))


def crossing(sources: set[int], targets: set[int]) -> frozenset[Pair]:
    return frozenset(itertools.product(sources, targets))


@given(num_nodes=st.integers(3, 8), seed=st.integers(0, 1000))
def test_where_nothing_is_shared_nothing_is_found(num_nodes: int, seed: int) -> None:
    links = {pair: 1e6 * (1 + (7 * pair[0] + 3 * pair[1]) % 20) for pair in all_pairs(num_nodes)}
    found = search(Network(links, noise=0.03, seed=seed), num_nodes)
    assert found.bottlenecks == []
    assert all(found.alone[pair] == pytest.approx(bandwidth, rel=0.2) for pair, bandwidth in links.items())


@given(
    islands=st.sampled_from([({0, 1}, {2, 3}), ({0, 3}, {1, 2}), ({0, 2}, {1, 3, 4}), ({0, 1, 2, 3}, {4, 5, 6, 7})]),
    seed=st.integers(0, 300),
)
def test_an_uplink_between_islands_is_found_in_each_direction(islands: tuple[set[int], set[int]], seed: int) -> None:
    first, second = islands
    num_nodes = len(first | second)
    there, back = crossing(first, second), crossing(second, first)
    network = Network(dict.fromkeys(all_pairs(num_nodes), 1e8), ((1.2e8, there), (0.9e8, back)), noise=0.02, seed=seed)
    found = {shared.members: shared.bandwidth_bytes_per_s for shared in search(network, num_nodes).bottlenecks}
    assert found.keys() == {there, back}
    assert found[there] == pytest.approx(1.2e8, rel=0.1)
    assert found[back] == pytest.approx(0.9e8, rel=0.1)


@given(num_nodes=st.integers(3, 7), seed=st.integers(0, 300))
def test_the_limit_of_each_node_is_found_and_kept_apart(num_nodes: int, seed: int) -> None:
    pairs = all_pairs(num_nodes)
    leaving = [frozenset(pair for pair in pairs if pair[0] == node) for node in range(num_nodes)]
    entering = [frozenset(pair for pair in pairs if pair[1] == node) for node in range(num_nodes)]
    network = Network(dict.fromkeys(pairs, 1e8), [(1e8, members) for members in (*leaving, *entering)], noise=0.02, seed=seed)
    found = search(network, num_nodes).bottlenecks
    assert {shared.members for shared in found} == {*leaving, *entering}
    assert all(shared.bandwidth_bytes_per_s == pytest.approx(1e8, rel=0.1) for shared in found)
    assert not any(shared.crosses for shared in found)


GBIT = 1e9 / 8


@pytest.mark.parametrize(("num_nodes", "rate"), [*((count, GBIT) for count in (3, 4, 6, 8, 12, 16)), (6, GBIT / 10)])
def test_the_limits_of_equal_nodes_on_one_switch_are_found_within_the_usual_budget(num_nodes: int, rate: float) -> None:
    pairs = all_pairs(num_nodes)
    limits = [frozenset(pair for pair in pairs if pair[end] == node) for node in range(num_nodes) for end in (0, 1)]
    network = Network(dict.fromkeys(pairs, rate), [(rate, members) for members in limits], noise=0.02)
    budget = Budget()
    measurements = divide(
        budget, ["node"] * num_nodes, num_inside=3 * num_nodes, rounds_inside=3, least_ping_bytes=1 << 20, least_stream_bytes=320_000
    )
    assert measurements.tells_sharing_of(rate)
    bandwidths = dict.fromkeys(pairs, rate)
    # What a round takes besides its streams, as on two busy cores.
    step_s = 0.05
    took_s = (measurements.ping_s + step_s) * (measurements.looks * measurements.rounds.tournament + 3)

    def together(pairs: Round) -> dict[Pair, float]:
        nonlocal took_s
        rates = network.together(pairs)
        streams_s = measurements.streams_s(pairs, bandwidths)
        num_bytes = {pair: min(max(streams_s[pair] * bandwidths[pair], 160_000) + 160_000, measurements.stream_bytes) for pair in pairs}
        took_s += step_s + max(num_bytes[pair] / rates[pair] for pair in pairs)
        return rates

    found = BottleneckSearch(together)
    found.run(all_paired_rounds(matchings(num_nodes), num_nodes), one_to_all_rounds(num_nodes))
    assert {shared.members for shared in found.bottlenecks} == set(limits)
    assert took_s < budget.for_search.seconds


def test_two_bottlenecks_of_one_round_are_not_taken_for_one() -> None:
    # All that leaves node 0 is slowed alike, by two things.
    limits = [frozenset({(0, 1), (0, 2)}), frozenset({(0, 3), (0, 4)})]
    network = Network(dict.fromkeys(all_pairs(5), 1e8), [(1e8, members) for members in limits], noise=0.02)
    assert {shared.members for shared in search(network, 5).bottlenecks} == set(limits)


def test_limits_of_single_nodes_can_be_dropped() -> None:
    uplink, node = Bottleneck(crossing({0, 1}, {2, 3}), 1e8, crosses=True), Bottleneck(crossing({0}, {1, 2, 3}), 1e8, crosses=False)
    found = BottleneckSearch(Network({}).together)
    assert not found.forget_limits_of_nodes()
    found.bottlenecks = [node, uplink]
    assert found.forget_limits_of_nodes()
    assert found.bottlenecks == [uplink]


def test_pairs_slower_than_both_of_their_nodes_are_suspected() -> None:
    measured = dict.fromkeys(all_pairs(4), 1e8) | dict.fromkeys(crossing({0, 1}, {2, 3}), 5e7)
    assert below_their_ends(measured) == crossing({0, 1}, {2, 3})
    slow = {pair: 1e7 if 3 in pair else 1e8 for pair in all_pairs(4)}
    assert below_their_ends(slow) == set(), "node 3 is slow to everyone"


@pytest.mark.parametrize("uplink", [1e8, 1.5e8])
def test_an_uplink_is_told_from_the_limits_of_nodes(uplink: float) -> None:
    pairs = all_pairs(4)
    nodes = [frozenset(pair for pair in pairs if pair[end] == node) for node in range(4) for end in (0, 1)]
    there, back = crossing({0, 1}, {2, 3}), crossing({2, 3}, {0, 1})
    network = Network(dict.fromkeys(pairs, 1e8), [(uplink, there), (uplink, back), *((1e8, members) for members in nodes)], noise=0.02)
    found = {shared.members for shared in search(network, 4).bottlenecks if shared.crosses}
    assert found == {there, back}


def test_two_pairs_of_one_node_that_share_its_wire_are_found() -> None:
    members = frozenset({(0, 2), (0, 3)})
    network = Network(dict.fromkeys(all_pairs(4), 2.5e7), [(2.5e7, members)], noise=0.03)
    (shared,) = search(network, 4).bottlenecks
    assert shared.members == members
    assert shared.bandwidth_bytes_per_s == pytest.approx(2.5e7, rel=0.1)


@given(seed=st.integers(0, 300))
def test_a_slow_pair_that_passes_through_a_bottleneck_belongs_to_it(seed: int) -> None:
    there = crossing({0, 1}, {2, 3})
    links = dict.fromkeys(all_pairs(4), 1e8) | {(1, 3): 3e7}
    (shared,) = search(Network(links, [(1e8, there)], noise=0.01, seed=seed), 4).bottlenecks
    assert shared.members == there
    assert shared.bandwidth_bytes_per_s == pytest.approx(1e8, rel=0.1)


@pytest.mark.parametrize("num_nodes", [4, 8, 16, 24])
def test_the_number_of_rounds_grows_hardly_faster_than_the_nodes(num_nodes: int) -> None:
    half = num_nodes // 2
    there, back = crossing(set(range(half)), set(range(half, num_nodes))), crossing(set(range(half, num_nodes)), set(range(half)))
    network = Network(dict.fromkeys(all_pairs(num_nodes), 1e8), [(half * 4e7, there), (half * 4e7, back)], noise=0.01)
    found = search(network, num_nodes)
    assert {shared.members for shared in found.bottlenecks if shared.crosses} == {there, back}
    # Half of all pairs are suspicious here, and measured alone: n^2 / 2 short measurements besides the rounds.
    assert network.num_rounds < 14 * num_nodes * math.log2(num_nodes) + num_nodes**2


def test_a_pause_of_the_machine_is_no_bottleneck() -> None:
    network = Network(dict.fromkeys(all_pairs(4), 1e8))
    calls = itertools.count()

    def together(pairs: tuple[Pair, ...]) -> dict[Pair, float]:
        slow = next(calls) in {3, 20}
        return {pair: rate * (0.3 if slow else 1.0) for pair, rate in network.together(pairs).items()}

    found = BottleneckSearch(together)
    found.run(all_paired_rounds(matchings(4), 4), one_to_all_rounds(4))
    assert found.bottlenecks == []


def test_what_was_found_stays_when_a_measurement_fails() -> None:
    network = Network(dict.fromkeys(all_pairs(4), 1e8), [(1e8, crossing({0, 1}, {2, 3}))])

    def together(pairs: tuple[Pair, ...]) -> dict[Pair, float]:
        if network.num_rounds >= 24:
            raise TimeoutError
        return network.together(pairs)

    found = BottleneckSearch(together)
    with pytest.raises(TimeoutError):
        found.run(all_paired_rounds(matchings(4), 4), one_to_all_rounds(4))
    assert len(found.bottlenecks) == 1


def test_pairs_that_filled_a_bottleneck_together_are_to_be_measured_again() -> None:
    there = Bottleneck(crossing({0, 1}, {2, 3}), 1e8, crosses=True)
    measured = {(0, 2): 5e7, (1, 3): 4.8e7, (0, 3): 3e7, (1, 2): 4e7, (0, 1): 2e8}
    assert shared_when_measured([((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1),)], measured, [there]) == {(0, 2), (1, 3)}
    assert shared_when_measured([((0, 2),), ((1, 3),)], measured, [there]) == set()


# Rates


def steady(rate: float, *, num_bytes: int, count: int, since_s: float = 0.0) -> list[tuple[float, int]]:
    return [(since_s + (place + 1) * num_bytes / rate, num_bytes) for place in range(count)]


def test_a_rate_is_that_of_the_time_in_which_all_were_under_way() -> None:
    # One runs for a second; the other starts late and goes on, faster, when the first has ended.
    first = steady(1e6, num_bytes=10_000, count=100)
    second = steady(1e6, num_bytes=10_000, count=80, since_s=0.2) + steady(5e6, num_bytes=10_000, count=100, since_s=1.0)
    found = rates({(0, 1): first, (2, 3): second}, warm_up_bytes=20_000)
    assert found == {(0, 1): pytest.approx(1e6), (2, 3): pytest.approx(1e6)}


def test_the_first_bytes_do_not_count() -> None:
    burst = [(1e-6 * place, 10_000) for place in range(13)]
    found = rates({(0, 1): burst + steady(1e6, num_bytes=10_000, count=50)}, warm_up_bytes=130_000)
    assert found[0, 1] == pytest.approx(1e6, rel=0.03)


def test_pairs_that_never_met_count_by_themselves() -> None:
    found = rates(
        {(0, 1): steady(1e6, num_bytes=10_000, count=50), (2, 3): steady(2e6, num_bytes=10_000, count=50, since_s=9.0)}, warm_up_bytes=0
    )
    assert found == {(0, 1): pytest.approx(1e6), (2, 3): pytest.approx(2e6)}
