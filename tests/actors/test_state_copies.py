"""Copies of layers that two processes keep: what arrives is what was copied, whatever happens on the way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from raypipe.actors.stage.state import PackedState, unpacked
from raypipe.actors.state_copies import NONE, CopyOrder, StateCopies
from raypipe.actors.transport.gate import Gate
from raypipe.actors.transport.secret import Secret, StoreAddress

HOST = "127.0.0.1"
SECRET = Secret.new()
LARGE = 4 << 20  # numbers: more than the system keeps of a connection on its way


def states(number: float, *, size: int = 10) -> dict[int, dict[str, Tensor]]:
    """Return the states of two layers, of several types and shapes, all numbers of which are the same."""
    return {
        3: {"weight": torch.full((2, size), number, dtype=torch.float64), "optimizer/step/weight": torch.tensor(number)},
        4: {"table": torch.full((size,), number, dtype=torch.bfloat16), "none": torch.zeros(0), "mask": torch.tensor([True, False])},
    }


def order(number: int, keeper: StoreAddress | None, *, kept: tuple[int, ...] = (), device: int = 1) -> CopyOrder:
    return CopyOrder(number, device, (3, 4), kept, keeper)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def check(copies: StateCopies, number: int, expected: dict[int, dict[str, Tensor]], *, device: int = 1) -> None:
    """Compare a copy that is kept to the last bit."""
    check_states(copies.states(number, device), expected)


def check_states(packed: Mapping[int, PackedState], expected: dict[int, dict[str, Tensor]]) -> None:
    found = {layer: unpacked(state) for layer, state in packed.items()}
    assert found.keys() == expected.keys()
    for layer, of_layer in expected.items():
        assert found[layer].keys() == of_layer.keys()
        for name, tensor in of_layer.items():
            assert found[layer][name].dtype == tensor.dtype
            assert torch.equal(found[layer][name], tensor)


@pytest.fixture
def deaf() -> Iterator[StoreAddress]:
    """Return an address where callers are let in, and nothing that they send is read."""
    server = socket.create_server((HOST, 0))
    address = StoreAddress(HOST, server.getsockname()[1], SECRET)
    with Gate(server, secret=SECRET, purpose="copies of layers") as gate:
        ends: list[socket.socket] = []
        is_over = threading.Event()

        def admit() -> None:
            while not is_over.is_set():
                ends.extend(one.end for one in gate.admit(0.1))

        thread = threading.Thread(target=admit)
        thread.start()
        yield address
        is_over.set()
        thread.join()
        for end in ends:
            end.close()


def test_a_copy_is_kept_elsewhere_and_later_changes_do_not_reach_it() -> None:
    own, other = StateCopies(), StateCopies()
    live = states(1.0)
    copy = own.take(order(7, other.listen(HOST, SECRET)), live)
    for state in live.values():
        for tensor in state.values():
            tensor.zero_()
    wait_for(lambda: own.newest_sent == 7)
    assert other.keys() == {(7, 1)}
    check(other, 7, states(1.0))
    check_states(copy.states(), states(1.0))
    assert own.keys() == set()


def test_a_copy_that_nobody_keeps_goes_nowhere() -> None:
    own = StateCopies()
    check_states(own.take(order(1, None), states(1.0)).states(), states(1.0))
    assert own.newest_sent == NONE


def test_copies_that_are_not_needed_are_dropped() -> None:
    own, other = StateCopies(), StateCopies()
    keeper = other.listen(HOST, SECRET)
    for number, kept in ((1, ()), (2, (1,)), (3, (2,)), (4, (3,))):
        own.take(order(number, keeper, kept=kept), states(number))
        wait_for(lambda number=number: own.newest_sent == number)  # type: ignore[misc]
    assert other.keys() == {(3, 1), (4, 1)}
    for number in (3, 4):
        check(other, number, states(number))  # in the memory of those that were dropped
    other.take(order(5, None, kept=(4,), device=0), states(5.0))
    assert other.keys() == {(4, 1)}


def test_two_devices_keep_the_copies_of_each_other() -> None:
    ends = StateCopies(), StateCopies()
    addresses = [end.listen(HOST, SECRET) for end in ends]
    for device, end in enumerate(ends):
        end.take(order(1, addresses[1 - device], device=device), states(device))
    wait_for(lambda: all(end.newest_sent == 1 for end in ends))
    for device, end in enumerate(ends):
        assert end.keys() == {(1, 1 - device)}
        check(end, 1, states(1 - device), device=1 - device)


def test_a_copy_that_reaches_nobody_does_not_stop_the_next_one() -> None:
    own, other = StateCopies(), StateCopies()
    with socket.create_server((HOST, 0)) as server:
        nobody = StoreAddress(HOST, server.getsockname()[1], SECRET)
    own.take(order(1, nobody), states(1.0))
    own.take(order(2, other.listen(HOST, SECRET), kept=(1,)), states(2.0))
    wait_for(lambda: own.newest_sent == 2)
    assert other.keys() == {(2, 1)}
    check(other, 2, states(2.0))


def test_a_copy_that_is_on_its_way_is_given_up_for_the_next_one(deaf: StoreAddress) -> None:
    own, other = StateCopies(), StateCopies()
    for number in range(1, 4):
        own.take(order(number, deaf), states(number, size=LARGE))
        time.sleep(0.1 * (number - 1))  # it may be connecting, or sending
    assert own.newest_sent == NONE
    own.take(order(4, other.listen(HOST, SECRET)), states(4.0, size=LARGE))
    wait_for(lambda: own.newest_sent == 4)
    assert other.keys() == {(4, 1)}
    check(other, 4, states(4.0, size=LARGE))


def test_who_does_not_know_the_secret_gets_nothing_kept() -> None:
    own, other = StateCopies(), StateCopies()
    address = other.listen(HOST, SECRET)
    own.take(order(1, StoreAddress(HOST, address.port, Secret.new())), states(1.0))
    time.sleep(0.5)
    assert own.newest_sent == NONE
    assert other.keys() == set()
