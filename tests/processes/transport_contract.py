"""What every transport does, as tests: subclass `TransportContract` and give the fixture `connect`."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from raypipe.actors.transport.protocol import Expected, TensorSpec, Transport
from raypipe.communication.shards import Segment
from raypipe.errors import AbortedError, TransportError, TransportTimeoutError
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.lower import Direction, Message

NAMES = ("alpha", "beta", "gamma")
PAIR = (0, 1)
ALL = (0, 1, 2)
GROUPS = (ALL, (0, 1), (1, 2))
MEGABYTE = 1 << 20


class Connect(Protocol):
    """Makes the connected ends of so many devices; every wait lasts at most so long."""

    def __call__(self, num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[Transport]: ...


def activation(index: int, *, source: int = 0, target: int = 1) -> Message:
    return Message(Direction.ACTIVATION, source, target, index)


def gradient(index: int) -> Message:
    return Message(Direction.GRADIENT, 1, 0, index)


def announced(message: Message, *tensors: Tensor) -> Expected:
    return Expected(message, tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors))


def gradients(members: tuple[int, ...], *, update: int = 0) -> Collective:
    return Collective(CollectiveKind.GRADIENTS, 3, update, 0, members)


def open_both(sender: Transport, receiver: Transport, messages: Sequence[Expected]) -> None:
    """Begins a window in which device 0 sends device 1 these messages."""
    receiver.open_window({0: messages}, {})
    sender.open_window({}, {1: messages})


def together(*parts: Callable[[], Any]) -> list[Any]:
    """What the parts return, each run in a thread of its own."""
    with ThreadPoolExecutor(len(parts)) as pool:
        futures = [pool.submit(part) for part in parts]
        return [future.result() for future in futures]


def seconds_until_raised(error: type[Exception], act: Callable[[], object], *, match: str, when: Callable[[], object]) -> float:
    """How long after `when`, which comes while `act` waits, `act` raises `error`."""
    acted_s: list[float] = []

    def now() -> None:
        acted_s.append(time.monotonic())
        when()

    timer = threading.Timer(0.2, now)
    timer.start()
    try:
        with pytest.raises(error, match=match):
            act()
        raised_s = time.monotonic()
    finally:
        timer.join()
    return raised_s - acted_s[0]


def becomes_true(condition: Callable[[], bool], *, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline_s:
        threading.Event().wait(0.005)
    return condition()


VIEWS: dict[str, Tensor] = {
    "float32": torch.arange(6.0).reshape(2, 3),
    "float64": torch.arange(6.0, dtype=torch.float64),
    "bfloat16": torch.arange(6.0, dtype=torch.bfloat16),
    "float16": torch.arange(6.0, dtype=torch.float16),
    "int64": torch.arange(6),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(12.0)[::3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "needing a gradient": torch.ones(3, requires_grad=True) * 2,
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


class TransportContract:
    """The tests that all transports pass alike."""

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        """Gives the transports; every subclass has its own."""
        pytest.fail(f"{type(self).__name__} has no fixture `connect`", pytrace=False)

    # Messages

    @pytest.mark.parametrize("what", VIEWS)
    def test_a_tensor_arrives_as_it_was_sent(self, connect: Connect, what: str) -> None:
        sender, receiver = connect()
        tensor = VIEWS[what]
        open_both(sender, receiver, [announced(activation(0), tensor)])
        sender.send(activation(0), 1, [tensor])
        (got,) = receiver.recv(activation(0), 0)
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert torch.equal(got, tensor)
        assert not got.requires_grad
        together(sender.close_window, receiver.close_window)

    def test_a_message_has_any_number_of_tensors(self, connect: Connect) -> None:
        sender, receiver = connect()
        several = (torch.ones(2), torch.arange(3), torch.empty(0), torch.tensor(4.0))
        open_both(sender, receiver, [announced(activation(0), *several), announced(activation(1)), announced(activation(2), torch.ones(1))])
        sender.send(activation(0), 1, several)
        sender.send(activation(1), 1, [])
        sender.send(activation(2), 1, [torch.ones(1)])
        for got, sent in zip(receiver.recv(activation(0), 0), several, strict=True):
            assert torch.equal(got, sent)
        assert receiver.recv(activation(1), 0) == ()
        assert torch.equal(receiver.recv(activation(2), 0)[0], torch.ones(1))
        together(sender.close_window, receiver.close_window)

    def test_a_message_without_bytes_is_still_waited_for(self, connect: Connect) -> None:
        _, receiver = connect(timeout_s=0.2)
        receiver.open_window({0: [announced(activation(0))]}, {})
        with pytest.raises(TransportTimeoutError):
            receiver.recv(activation(0), 0)

    def test_a_thousand_messages_are_sent_before_one_is_read(self, connect: Connect) -> None:
        sender, receiver = connect()
        open_both(sender, receiver, [announced(activation(index), torch.empty(8)) for index in range(1000)])
        for index in range(1000):
            sender.send(activation(index), 1, [torch.full((8,), float(index))])
        for index in range(1000):
            assert receiver.recv(activation(index), 0)[0].tolist() == [index] * 8
        together(sender.close_window, receiver.close_window)

    def test_messages_are_sent_before_the_receiver_opens_its_window(self, connect: Connect) -> None:
        sender, receiver = connect()
        messages = [announced(activation(index), torch.tensor(0)) for index in range(10)]
        sender.open_window({}, {1: messages})
        for index in range(10):
            sender.send(activation(index), 1, [torch.tensor(index)])
        receiver.open_window({0: messages}, {})
        assert [int(receiver.recv(activation(index), 0)[0]) for index in range(10)] == list(range(10))
        together(sender.close_window, receiver.close_window)

    def test_a_message_of_64_megabytes_arrives(self, connect: Connect) -> None:
        sender, receiver = connect()
        big = torch.arange(16 * MEGABYTE, dtype=torch.float32)
        open_both(sender, receiver, [announced(activation(0), big)])
        sender.send(activation(0), 1, [big])
        assert torch.equal(receiver.recv(activation(0), 0)[0], big)
        together(sender.close_window, receiver.close_window)

    def test_two_devices_that_both_send_first_do_not_block_each_other(self, connect: Connect) -> None:
        ends = connect()
        big = torch.arange(4 * MEGABYTE, dtype=torch.float32)
        activations = [announced(activation(index), big) for index in range(3)]
        gradients = [announced(gradient(index), big) for index in range(3)]
        ends[0].open_window({1: gradients}, {1: activations})
        ends[1].open_window({0: activations}, {0: gradients})
        for index in range(3):
            ends[0].send(activation(index), 1, [big])
            ends[1].send(gradient(index), 0, [big])
        for index in range(3):
            assert torch.equal(ends[0].recv(gradient(index), 1)[0], big)
            assert torch.equal(ends[1].recv(activation(index), 0)[0], big)
        together(ends[0].close_window, ends[1].close_window)

    def test_channels_do_not_wait_for_each_other(self, connect: Connect) -> None:
        ends = connect(3)
        messages = {peer: [announced(activation(0, source=peer, target=2), torch.tensor(0))] for peer in PAIR}
        ends[2].open_window(messages, {})
        for peer in PAIR:
            ends[peer].open_window({}, {2: messages[peer]})
        ends[1].send(activation(0, source=1, target=2), 2, [torch.tensor(11)])
        assert int(ends[2].recv(activation(0, source=1, target=2), 1)[0]) == 11
        ends[0].send(activation(0, source=0, target=2), 2, [torch.tensor(10)])
        assert int(ends[2].recv(activation(0, source=0, target=2), 0)[0]) == 10
        together(*(end.close_window for end in ends))

    def test_the_receiver_may_change_what_it_got(self, connect: Connect) -> None:
        sender, receiver = connect()
        tensor = torch.ones(4)
        open_both(sender, receiver, [announced(activation(0), tensor)])
        sender.send(activation(0), 1, [tensor])
        receiver.recv(activation(0), 0)[0].zero_()
        assert tensor.tolist() == [1.0] * 4
        together(sender.close_window, receiver.close_window)

    def test_windows_follow_each_other(self, connect: Connect) -> None:
        ends = connect()
        # Some windows bring the lists of a former one, and some new ones.
        activations = [[announced(activation(index), torch.tensor(0)) for index in range(5)] for _ in range(12)]
        gradients = [[announced(gradient(index), torch.tensor(0)) for index in range(5)] for _ in range(12)]
        turns = [*range(12), *[0, 11] * 4]

        def first() -> None:
            for window, turn in enumerate(turns):
                ends[0].open_window({1: gradients[turn]}, {1: activations[turn]})
                for index in range(5):
                    ends[0].send(activation(index), 1, [torch.tensor(100 * window + index)])
                for index in range(5):
                    assert int(ends[0].recv(gradient(index), 1)[0]) == -(100 * window + index)
                ends[0].close_window()

        def second() -> None:
            for turn in turns:
                ends[1].open_window({0: activations[turn]}, {0: gradients[turn]})
                for index in range(5):
                    ends[1].send(gradient(index), 0, [-ends[1].recv(activation(index), 0)[0]])
                ends[1].close_window()

        together(first, second)

    def test_a_sent_tensor_is_dropped_once_it_has_left(self, connect: Connect) -> None:
        sender, receiver = connect()
        open_both(sender, receiver, [announced(activation(index), torch.empty(1000)) for index in range(20)])
        references = []
        for index in range(20):
            tensor = torch.ones(1000)
            references.append(weakref.ref(tensor))
            sender.send(activation(index), 1, [tensor])
            del tensor
        for index in range(20):
            receiver.recv(activation(index), 0)
        assert becomes_true(lambda: not any(reference() is not None for reference in references), within_s=2.0)
        together(sender.close_window, receiver.close_window)

    # What is not as announced

    @pytest.mark.parametrize(
        ("message", "tensors"),
        [
            (activation(1), [torch.ones(4)]),
            (activation(0), [torch.ones(40)]),
            (activation(0), [torch.ones(2)]),
            (activation(0), [torch.ones(4, dtype=torch.int32)]),
            (activation(0), [torch.ones(2, 2)]),
            (activation(0), []),
        ],
        ids=["microbatch", "longer", "shorter", "dtype", "shape", "missing"],
    )
    def test_what_the_peer_sent_instead_is_never_taken_for_the_message(
        self, connect: Connect, message: Message, tensors: list[Tensor]
    ) -> None:
        sender, receiver = connect(timeout_s=0.3)
        receiver.open_window({0: [announced(activation(0), torch.empty(4))]}, {})
        sender.open_window({}, {1: [announced(message, *tensors)]})
        sender.send(message, 1, tensors)
        with pytest.raises(TransportError, match="microbatch 0 with device alpha: "):
            receiver.recv(activation(0), 0)

    # Collectives

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
    def test_sums_are_exact_in_groups_that_overlap(self, connect: Connect, dtype: torch.dtype) -> None:
        ends = connect(3)

        def device(number: int) -> dict[tuple[int, ...], list[float]]:
            ends[number].open_window({}, {})
            mine = [members for members in GROUPS if number in members]
            tensors = {members: torch.full((5,), 10**number, dtype=dtype) for members in mine}
            pending = {members: ends[number].start(gradients(members), tensors[members]) for members in mine}
            for members in reversed(mine):
                assert pending[members].wait() is tensors[members]
            ends[number].close_window()
            return {members: tensor.tolist() for members, tensor in tensors.items()}

        for number, sums in enumerate(together(*(lambda number=number: device(number) for number in ALL))):
            for members, values in sums.items():
                assert values == [sum(10**member for member in members)] * 5, (number, members)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
    @pytest.mark.parametrize("borders", [(500, 1500, 1500, 1503), (2, 3, 5, 6)], ids=["one owns nothing", "few"])
    def test_owners_get_the_sums_of_their_numbers_and_send_theirs_to_all(
        self, connect: Connect, borders: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        ends = connect(3)
        owners = (2, 0, 1)
        assert {end.slice_owners(ALL) for end in ends} == {ends[0].slice_owners(ALL)}
        assert sorted(ends[0].slice_owners(ALL)) == list(ALL)
        segments = (*map(Segment, borders, owners), Segment(borders[-1], None))  # all need the last numbers
        shares = [(torch.arange(borders[-1]) % 50 + device).to(dtype) for device in ALL]
        total = (torch.arange(borders[-1]) % 50 * 3 + 3).to(dtype)
        pieces = [slice(*ends_of) for ends_of in itertools.pairwise((0, *borders))]
        pending = [end.start(gradients(ALL), share.clone(), segments=segments) for end, share in zip(ends, shares, strict=True)]
        for device, part in enumerate(pending):
            found = part.wait()
            for piece, owner in zip(pieces, (*owners, device), strict=True):
                assert owner != device or torch.equal(found[piece], total[piece])
        published = dataclasses.replace(gradients(ALL), kind=CollectiveKind.WEIGHTS)
        whole = torch.cat([shares[owner][piece] for piece, owner in zip(pieces, owners, strict=False)])
        pending = [
            end.start(published, share[: borders[2]].clone(), segments=segments[:3]) for end, share in zip(ends, shares, strict=True)
        ]
        for part in pending:
            assert torch.equal(part.wait(), whole)

    def test_sixteen_bit_floats_are_rounded_once(self, connect: Connect) -> None:
        ends = connect(3)
        # In bfloat16, 256 + 1 is 256.
        pending = [
            end.start(gradients(ALL), torch.tensor([value], dtype=torch.bfloat16)) for end, value in zip(ends, (256, 1, 1), strict=True)
        ]
        assert [float(part.wait()[0]) for part in pending] == [258.0] * 3

    @pytest.mark.parametrize(
        "fill",
        [
            lambda: torch.tensor(1.0),
            lambda: torch.empty(0),
            lambda: torch.ones(3, 4).t(),
            lambda: torch.ones(9)[::2],
            lambda: torch.ones(2, requires_grad=True),
            lambda: torch.ones(MEGABYTE),
        ],
        ids=["scalar", "empty", "transposed", "strided", "needing a gradient", "large"],
    )
    def test_a_sum_is_made_in_place(self, connect: Connect, fill: Callable[[], Tensor]) -> None:
        ends = connect()
        tensors = [fill() for _ in ends]
        pending = [end.start(gradients(PAIR), tensor) for end, tensor in zip(ends, tensors, strict=True)]
        for part, tensor in zip(pending, tensors, strict=True):
            assert part.wait() is tensor
            assert torch.equal(tensor, torch.full_like(tensor, 2.0))

    def test_collectives_and_messages_pass_each_other(self, connect: Connect) -> None:
        ends = connect()
        open_both(ends[0], ends[1], [announced(activation(index), torch.tensor(0)) for index in range(10)])
        early = ends[1].start(gradients(PAIR), torch.ones(3))
        for index in range(10):
            ends[0].send(activation(index), 1, [torch.tensor(index)])
            assert int(ends[1].recv(activation(index), 0)[0]) == index
        late = ends[0].start(gradients(PAIR), torch.ones(3))
        assert early.wait().tolist() == late.wait().tolist() == [2.0] * 3
        together(ends[0].close_window, ends[1].close_window)

    def test_many_collectives_are_under_way_at_once(self, connect: Connect) -> None:
        ends = connect()
        pending = [[end.start(gradients(PAIR, update=update), torch.tensor([float(update)])) for update in range(50)] for end in ends]
        for parts in pending:
            assert [float(part.wait()[0]) for part in parts] == [2.0 * update for update in range(50)]

    # Nobody answers

    def test_a_message_that_does_not_come_in_time_names_the_peer(self, connect: Connect) -> None:
        _, receiver = connect(timeout_s=0.3)
        receiver.open_window({0: [announced(activation(5), torch.ones(2))]}, {})
        with pytest.raises(
            TransportTimeoutError, match=r"device beta: activation 0->1 of microbatch 5 with device alpha: .* within 0\.3 s"
        ):
            receiver.recv(activation(5), 0)

    def test_a_sum_that_does_not_come_in_time_names_the_members(self, connect: Connect) -> None:
        ends = connect(3, timeout_s=0.3)
        pending = ends[1].start(gradients(ALL, update=4), torch.ones(2))
        with pytest.raises(
            TransportTimeoutError, match=r"device beta: gradients of stage 3 for update 4 with device alpha, gamma: .* 0\.3 s"
        ):
            pending.wait()

    def test_a_peer_that_closes_its_end_is_noticed_by_who_waits_for_a_message(self, connect: Connect) -> None:
        sender, receiver = connect()
        open_both(sender, receiver, [announced(activation(0), torch.ones(2))])
        wait_s = seconds_until_raised(
            TransportError, lambda: receiver.recv(activation(0), 0), match="device beta: .* with device alpha: .*closed", when=sender.close
        )
        assert wait_s < 2.0

    def test_a_peer_that_closes_its_end_is_noticed_by_who_waits_for_a_sum(self, connect: Connect) -> None:
        ends = connect(3)
        pending = ends[0].start(gradients(ALL), torch.ones(2))
        wait_s = seconds_until_raised(
            TransportError, pending.wait, match="device alpha: .* with device beta, gamma: .*closed", when=ends[2].close
        )
        assert wait_s < 2.0

    # Abort

    def test_abort_ends_the_wait_for_a_message(self, connect: Connect) -> None:
        _, receiver = connect()
        receiver.open_window({0: [announced(activation(0), torch.ones(2))]}, {})
        wait_s = seconds_until_raised(
            AbortedError,
            lambda: receiver.recv(activation(0), 0),
            match="^device gamma failed$",
            when=lambda: receiver.abort("device gamma failed"),
        )
        assert wait_s < 1.0

    def test_abort_ends_the_wait_for_a_sum(self, connect: Connect) -> None:
        ends = connect(3)
        pending = ends[0].start(gradients(ALL), torch.ones(2))
        wait_s = seconds_until_raised(AbortedError, pending.wait, match="^enough$", when=lambda: ends[0].abort("enough"))
        assert wait_s < 1.0

    def test_after_abort_nothing_starts_and_the_first_reason_stays(self, connect: Connect) -> None:
        ends = connect()
        ends[1].open_window({0: [announced(activation(0), torch.ones(2))]}, {})
        pending = ends[1].start(gradients(PAIR), torch.ones(2))
        ends[1].abort("the first")
        ends[1].abort("the second")
        for act in (
            lambda: ends[1].open_window({}, {}),
            lambda: ends[1].send(gradient(0), 0, [torch.ones(2)]),
            lambda: ends[1].recv(activation(0), 0),
            lambda: ends[1].start(gradients(PAIR), torch.ones(2)),
            pending.wait,
            ends[1].close_window,
        ):
            with pytest.raises(AbortedError, match=r"^the first$"):
                act()

    # The end

    def test_close_leaves_no_thread_and_can_be_repeated(self, connect: Connect) -> None:
        before = set(threading.enumerate())
        ends = connect(3)
        open_both(ends[0], ends[1], [announced(activation(0), torch.ones(2))])
        ends[0].send(activation(0), 1, [torch.ones(2)])
        ends[0].start(gradients(ALL), torch.ones(2))
        for end in (*ends, *ends):
            end.close()
        assert set(threading.enumerate()) <= before

    def test_close_after_abort_leaves_no_thread(self, connect: Connect) -> None:
        before = set(threading.enumerate())
        for end in connect():
            end.open_window({}, {})
            end.abort("enough")
            end.close()
        assert set(threading.enumerate()) <= before
