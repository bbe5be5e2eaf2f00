"""Lowered programs as numbers, so that the event loop looks nothing up by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from raypipe.schedules.collectives import Collective, Start
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Compute, DeviceProgram, Message, Recv, Send, starts_inside

COMPUTE, GO_ON, SEND, RECV, START, AWAIT = range(6)
"""Kinds of items. A Compute inside which sums start goes on behind each of these starts."""


class Piece(NamedTuple):
    """Piece `number`, from 1 to `last`, of a slot of one Op, in which buckets of `num_buckets` begin their sums: one behind each piece."""

    number: int
    last: int
    num_buckets: int


class SlotClass(NamedTuple):
    """The device and one slot of all slots that take equally long; `piece` of it, or all."""

    device: int
    slot: Compute
    piece: Piece | None = None


class CompiledOrder:
    """Lowered programs of a valid schedule, to be timed with many costs.

    The n-th Recv of a channel waits for its n-th Send. The items themselves are not kept: planners keep many orders.
    """

    def __init__(self, programs: Sequence[DeviceProgram]) -> None:
        self.devices = tuple(program.device for program in programs)
        self.kinds: list[bytearray] = []
        self.numbers: list[list[int]] = []
        """By program and item: the class of a Compute or of its next piece, the number of a message or of a collective."""
        self.computes: list[list[Compute]] = []
        self.classes: list[SlotClass] = []
        self.messages: list[Message] = []
        self.transfer_of: list[int] = []
        self.transfers: list[tuple[int, int, Message]] = []
        """Sender, receiver and one message of each class of messages with the same path and size."""
        self.collectives: list[Collective] = []
        self.after: list[dict[int, tuple[int, ...]]] = []
        """By program and collective, the collectives that must have ended before the device takes part in it."""
        self._class_of: dict[object, int] = {}
        self._transfer_number: dict[object, int] = {}
        self._collective_of: dict[Collective, int] = {}
        self._sent: dict[tuple[int, int], list[int]] = {}
        # A message's number is known at its Send: all programs' sends come first.
        sends = [[self._message(program.device, item) for item in program.items if type(item) is Send] for program in programs]
        for program, numbers in zip(programs, sends, strict=True):
            self._add(program, numbers)

    def _message(self, device: int, item: Send) -> int:
        number = len(self.messages)
        message = item.message
        self.messages.append(message)
        key = (device, item.device, message.source, message.target, message.rows)
        known = self._transfer_number.get(key)
        if known is None:
            known = self._transfer_number[key] = len(self.transfers)
            self.transfers.append((device, item.device, message))
        self.transfer_of.append(known)
        channel = self._sent.get((device, item.device))
        if channel is None:
            channel = self._sent[device, item.device] = []
        channel.append(number)
        return number

    def _add(self, program: DeviceProgram, sends: list[int]) -> None:
        device = program.device
        kinds, numbers, computes = bytearray(), [], []
        unsent = iter(sends)
        arriving = {peer: iter(channel) for (peer, target), channel in self._sent.items() if target == device}
        after: dict[int, tuple[int, ...]] = {}
        started: set[Collective] = set()
        for position, item in enumerate(program.items):
            kind = type(item)
            if kind is Compute:
                assert isinstance(item, Compute)
                computes.append(item)
                kinds.append(COMPUTE)
                last = None
                inside = starts_inside(program.items, position, program.num_microbatches)
                for number, start in enumerate(inside, 1):
                    last = Piece(len(inside) + 1, len(inside) + 1, start.collective.num_parts)
                    numbers += [self._class(device, item, last._replace(number=number)), self._number(start.collective)]
                    kinds += bytes((START, GO_ON))
                    started.add(start.collective)
                numbers.append(self._class(device, item, last))
            elif kind is Send:
                kinds.append(SEND)
                numbers.append(next(unsent))
            elif kind is Recv:
                assert isinstance(item, Recv)
                number = next(arriving[item.device])
                message = self.messages[number]
                assert message is item.message or message == item.message, f"device {device} expects {item.message}, {message} is sent"
                kinds.append(RECV)
                numbers.append(number)
            else:
                assert not isinstance(item, Compute | Send | Recv)
                if kind is Start and item.collective in started:
                    continue
                number = self._number(item.collective)
                if isinstance(item, Start) and item.after:
                    after[number] = tuple(map(self._number, item.after))
                kinds.append(START if kind is Start else AWAIT)
                numbers.append(number)
        self.after.append(after)
        self.kinds.append(kinds)
        self.numbers.append(numbers)
        self.computes.append(computes)

    def _class(self, device: int, item: Compute, piece: Piece | None = None) -> int:
        ops = item.ops
        key: object = (
            (device, ops[0].stage, ops[0].kind, item.rows[0], piece)
            if len(ops) == 1
            else (device, tuple((op.stage, op.kind) for op in ops), item.rows)
        )
        known = self._class_of.get(key)
        if known is None:
            known = self._class_of[key] = len(self.classes)
            self.classes.append(SlotClass(device, item, piece))
        return known

    def _number(self, collective: Collective) -> int:
        known = self._collective_of.get(collective)
        if known is None:
            known = self._collective_of[collective] = len(self.collectives)
            self.collectives.append(collective)
        return known

    @cached_property
    def deadlines(self) -> dict[tuple[int, int], int]:
        """For each program and collective, the position of the item that waits for it."""
        return {
            (program, number): position
            for program, (kinds, numbers) in enumerate(zip(self.kinds, self.numbers, strict=True))
            for position, (kind, number) in enumerate(zip(kinds, numbers, strict=True))
            if kind == AWAIT
        }

    @cached_property
    def due(self) -> list[int]:
        """For each message, how many slots of its receiver's program come before the one that waits for it."""
        due = [0] * len(self.messages)
        for kinds, numbers in zip(self.kinds, self.numbers, strict=True):
            num_slots = 0
            for kind, number in zip(kinds, numbers, strict=True):
                num_slots += kind == COMPUTE
                if kind == RECV:
                    due[number] = num_slots
        return due

    @cached_property
    def updates(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Each update's U's, as pairs (program, number of the slot in it)."""
        slots: dict[int, list[tuple[int, int]]] = {}
        for program, computes in enumerate(self.computes):
            for position, item in enumerate(computes):
                if item.ops[0].kind is OpKind.UPDATE:
                    slots.setdefault(item.ops[0].index, []).append((program, position))
        return tuple(tuple(slots[update]) for update in sorted(slots))

    @cached_property
    def microbatches_per_update(self) -> int:
        """Number of microbatches of an update."""
        ops = (op for computes in self.computes for item in computes for op in item.ops)
        num_microbatches = 1 + max((op.index for op in ops if not op.kind.per_update), default=0)
        return max(num_microbatches // max(len(self.updates), 1), 1)
