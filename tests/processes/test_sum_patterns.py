"""Sums over TCP by patterns: their bits, whatever comes first, and a change of pattern between two sums."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.actors.transport.process import ProcessTransport
from raypipe.communication import policy
from raypipe.communication.patterns import Pattern, Tree, direct, ring, tree
from raypipe.communication.policy import Communication
from raypipe.errors import TransportError
from raypipe.schedules.collectives import Collective, CollectiveKind
from tests.processes.process_ends import Make, connected, members_of, ring_sum
from tests.processes.transport_contract import becomes_true, gradients, together

EVERYBODY = (0, 1, 2, 3)
NODES = Pattern(((0, 1), (2, 3)))
TREE = tree(((0, 2), (1, 2), (1, 3)))
MESHED_TREE = tree(TREE.edges, is_meshed=True)
TREES = Pattern(NODES.groups, trees=(Tree(((0, 1), (0, 2), (0, 3)), 0, 5), Tree(((0, 1), (1, 2), (2, 3)), 2, 3), Tree(TREE.edges, 2)))
NUMEL = 10_007


def by_additions(tensors: Sequence[Tensor], pattern: Pattern) -> Tensor:
    """What members make of the tensors, added here in the order that the pattern says."""

    def added(order: Any, part: slice) -> Tensor:
        return tensors[order][part] if isinstance(order, int) else added(order[0], part) + added(order[1], part)

    starts = pattern.starts(len(tensors[0]))
    parts = [slice(*ends) for ends in itertools.pairwise(starts)]
    return torch.cat([added(order, part) for order, part in zip(pattern.additions, parts, strict=True)])


def numbers(seed: int, numel: int = NUMEL) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(numel) for _ in EVERYBODY]


def with_pattern(make: Make, pattern: Pattern, **changed: Any) -> list[ProcessTransport]:
    return connected(make, 4, patterns={EVERYBODY: pattern}, **changed, **members_of(4))


def summed(ends: Sequence[ProcessTransport], tensors: Sequence[Tensor], *, update: int) -> list[Tensor]:
    collective = gradients(EVERYBODY, update=update)
    pending = [end.start(collective, tensor.clone()) for end, tensor in zip(ends, tensors, strict=True)]
    return [part.wait() for part in pending]


@pytest.mark.parametrize("pattern", [ring((0, 2, 1, 3)), direct(range(4)), NODES, Pattern(((0, 1, 2), (3,)), direct=True), TREE], ids=str)
@pytest.mark.parametrize(
    ("least_bytes", "communication"),
    [(1001, Communication(chunk_s=1e-15)), (1, Communication(chunk_s=100.0)), (1, Communication(scheduled=False))],
    ids=["odd", "huge", "unscheduled"],
)
def test_numbers_are_added_in_the_order_of_the_pattern(
    make: Make, monkeypatch: pytest.MonkeyPatch, pattern: Pattern, least_bytes: int, communication: Communication
) -> None:
    monkeypatch.setattr(policy, "LEAST_CHUNK_BYTES", least_bytes)
    ends = with_pattern(make, pattern, communication=communication)
    for update in range(3):
        tensors = numbers(update)
        expected = by_additions(tensors, pattern)
        for total in summed(ends, tensors, update=update):
            assert torch.equal(total, expected)


@pytest.mark.parametrize("pattern", [TREE, tree(((0, 1), (1, 2), (2, 3)), is_meshed=True), TREES], ids=str)
def test_so_are_those_of_pipelined_slices(make: Make, monkeypatch: pytest.MonkeyPatch, pattern: Pattern) -> None:
    monkeypatch.setattr(policy, "LEAST_CHUNK_BYTES", 1001)
    sizes = (70_001, 90_003)
    assert all(pattern.is_pipelined(4 * size) for size in sizes)
    ends = with_pattern(make, pattern, communication=Communication(chunk_s=1e-15))
    tensors = [numbers(size, size) for size in sizes]
    under_way = [
        [end.start(gradients(EVERYBODY, update=number), part.clone()) for end, part in zip(ends, parts, strict=True)]
        for number, parts in enumerate(tensors)
    ]
    for parts, pending in zip(tensors, under_way, strict=True):
        for part in pending:
            assert torch.equal(part.wait(), by_additions(parts, pattern))


def test_members_that_can_all_communicate_leave_a_tree(make: Make) -> None:
    tensors = numbers(0)
    ends = with_pattern(make, MESHED_TREE)
    assert all(torch.equal(total, by_additions(tensors, TREE)) for total in summed(ends, tensors, update=0))
    for end in ends:
        end.use_patterns({EVERYBODY: ring(range(4))})
    assert all(torch.equal(total, ring_sum(tensors)) for total in summed(ends, tensors, update=1))
    for end in ends:
        end.use_patterns({EVERYBODY: MESHED_TREE})
    assert all(torch.equal(total, by_additions(tensors, TREE)) for total in summed(ends, tensors, update=2))


def test_direct_exchange_has_the_bits_of_the_ring_and_two_levels_have_others(make: Make) -> None:
    tensors = numbers(0)
    around = ring_sum(tensors)
    ends = with_pattern(make, direct(range(4)))
    assert all(torch.equal(total, around) for total in summed(ends, tensors, update=0))
    for end in ends:
        end.use_patterns({EVERYBODY: NODES})
    other = summed(ends, tensors, update=1)
    assert all(torch.equal(total, by_additions(tensors, NODES)) for total in other)
    assert not torch.equal(other[0], around), "additions of four numbers differ somewhere among ten thousand"
    for end in ends:
        end.use_patterns({EVERYBODY: ring(range(4))})
    assert all(torch.equal(total, around) for total in summed(ends, tensors, update=2))


@pytest.mark.parametrize("pattern", [direct(range(4)), NODES], ids=str)
def test_members_start_sums_in_any_order_by_any_pattern(make: Make, pattern: Pattern) -> None:
    ends = with_pattern(make, pattern)
    tensors = [numbers(update) for update in range(6)]
    norm = Collective(CollectiveKind.NORM, 0, 0, 0, EVERYBODY)
    norms = [torch.tensor([float(device), 1.0], dtype=torch.float64) for device in EVERYBODY]

    def member(device: int) -> None:
        chance = random.Random(device)
        order = list(range(6))
        chance.shuffle(order)
        pending = {
            update: ends[device].start(gradients(EVERYBODY, update=update), tensors[update][device].clone(), deadline=chance.randrange(9))
            for update in order
        }
        ends[device].start(norm, norms[device]).wait()
        chance.shuffle(order)
        for update in order:
            assert torch.equal(pending[update].wait(), by_additions(tensors[update], pattern)), update

    together(*(lambda device=device: member(device) for device in EVERYBODY))
    assert all(total.tolist() == [6.0, 4.0] for total in norms)


def test_a_member_with_another_pattern_is_told_so(make: Make) -> None:
    ends = with_pattern(make, ring(range(4)))
    ends[2].use_patterns({EVERYBODY: direct(range(4))})
    pending = [end.start(gradients(EVERYBODY), tensor) for end, tensor in zip(ends, numbers(0), strict=True)]
    with pytest.raises(TransportError, match=r"different things: float32\[10007\] \(direct 0 1 2 3\), float32\[10007\] \(ring 0 1 2 3\)"):
        pending[2].wait()


@pytest.mark.parametrize("pattern", [ring((0, 2, 1, 3)), direct(range(4)), NODES], ids=str)
@pytest.mark.parametrize("victim", [0, 3])
def test_all_members_leave_a_sum_of_which_one_is_gone(make: Make, pattern: Pattern, victim: int) -> None:
    """Who hears of it leaves, so that the others do."""
    ends = with_pattern(make, pattern)
    started = threading.Barrier(4)
    gone_s: list[float] = []

    def member(device: int) -> float:
        if device == victim:
            started.wait()
            gone_s.append(time.monotonic())
            ends[device].close()
            return gone_s[0]
        pending = ends[device].start(gradients(EVERYBODY), torch.ones(NUMEL))
        started.wait()
        with pytest.raises(TransportError, match="connection closed by peer"):
            pending.wait()
        ends[device].close()
        return time.monotonic()

    left_s = together(*(lambda device=device: member(device) for device in EVERYBODY))
    assert max(left_s) - gone_s[0] < 2.0


def test_the_memory_of_a_sum_is_free_without_a_collection_of_cycles(make: Make) -> None:
    ends = with_pattern(make, ring(range(4)))
    gc.disable()
    try:
        pending = [end.start(gradients(EVERYBODY), tensor) for end, tensor in zip(ends, numbers(0), strict=True)]
        kept = [weakref.ref(part.wait()) for part in pending]
        del pending
        assert becomes_true(lambda: not any(each() is not None for each in kept), within_s=5.0)
    finally:
        gc.enable()
