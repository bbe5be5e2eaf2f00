"""Copies of the state of layers: of this process's device, on their way to another process, and of other devices, which it keeps.

A device copies its layers between two windows. While the next one runs, a thread sends the copy to another process, which answers once it
has all of it. In Ray's object store, an object that another node fetches costs more processor time than the update of a small stage.

    sender      length, then JSON: number, device, kept numbers, tensors by layer and name  --> then the bytes of all tensors
                                                                                            <-- number, once all is there
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypipe.actors.stage.state import PackedState, PackedTensor
from raypipe.actors.transport.gate import Gate, call
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import listening_at

_LOG = logging.getLogger("raypipe.stage")
_PURPOSE = "copies of layers"
_LENGTH = struct.Struct("<Q")
_TICK_S = 5.0
_CALL_S = 10.0

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
NONE = -1
"""The number of no copy."""


@dataclass(frozen=True)
class CopyOrder:
    """What a device is to copy, and where that goes.

    Attributes:
        number: Of the copy, of which each device's part has the same; later ones are larger.
        device: Number of the device.
        layers: Those that it exports.
        kept: Numbers of earlier copies that are still needed; all others are dropped.
        keeper: Where another process takes copies; `None` if there is none on another node.
    """

    number: int
    device: int
    layers: tuple[int, ...]
    kept: tuple[int, ...]
    keeper: StoreAddress | None

    @property
    def text(self) -> str:
        """Name of the copy, for messages."""
        return f"copy {self.number} of device {self.device}"


@dataclass(frozen=True)
class _Tensor:
    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass
class PackedCopy:
    """The state of some layers in one piece of memory, which processes of one node can share."""

    tensors: list[_Tensor]
    data: Bytes

    def states(self) -> dict[int, PackedState]:
        """Return the state of each layer, which shares memory with the copy."""
        states: dict[int, PackedState] = {}
        for one in self.tensors:
            packed = PackedTensor(self.data[one.begin : one.end], getattr(torch, one.dtype), tuple(one.shape))
            states.setdefault(one.layer, {})[one.name] = packed
        return states


class StateCopies:
    """Copies the layers of a device, and keeps copies of others', by number and device. Methods may be called from several threads."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], PackedCopy] = {}
        self._lock = threading.Lock()
        self._listener: _Listener | None = None
        self._sender: _Sender | None = None
        self._own = np.empty(0, np.uint8)
        self._unused: list[Bytes] = []

    @property
    def newest_sent(self) -> int:
        """Number of the newest copy that its keeper has; `NONE` before there is one."""
        return self._sender.newest_sent if self._sender is not None else NONE

    def listen(self, host: str, secret: Secret) -> StoreAddress:
        """Take copies from other processes from now on, at an address that they reach; return it."""
        if self._listener is None:
            self._listener = _Listener(self, host, secret)
        return self._listener.address

    def take(self, order: CopyOrder, states: Mapping[int, Mapping[str, Tensor]]) -> PackedCopy:
        """Copy the states of layers, begin to send the copy, and return it; what was on its way before is given up.

        It shares its memory with the next copy.
        """
        if self._sender is None:
            self._sender = _Sender()
        self._sender.give_up()
        self.drop_all_but({order.number, *order.kept})
        copy = self._copied(states)
        if order.keeper is not None:
            self._sender.send(order, order.keeper, copy)
        return copy

    def _copied(self, states: Mapping[int, Mapping[str, Tensor]]) -> PackedCopy:
        tensors: list[_Tensor] = []
        end = 0
        for layer, state in states.items():
            for name, tensor in state.items():
                begin, end = end, end + tensor.nbytes
                tensors.append(_Tensor(layer, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin, end))
        if len(self._own) != end:
            self._own = np.empty(end, np.uint8)
        to = torch.from_numpy(self._own)
        for one in tensors:
            to[one.begin : one.end].copy_(states[one.layer][one.name].detach().reshape(-1).view(torch.uint8))
        return PackedCopy(tensors, self._own)

    def memory(self, num_bytes: int) -> Bytes:
        """Return memory for a copy: rather that of a dropped one, since taking it anew from the system takes longer than copying."""
        with self._lock:
            at = next((at for at, unused in enumerate(self._unused) if len(unused) == num_bytes), None)
            return np.empty(num_bytes, np.uint8) if at is None else self._unused.pop(at)

    def keep(self, number: int, device: int, kept: Collection[int], copy: PackedCopy) -> None:
        """Keep a copy of another device's layers; drop all whose numbers are not needed any more."""
        self.drop_all_but({number, *kept})
        with self._lock:
            self._kept[number, device] = copy

    def drop_all_but(self, kept: Collection[int]) -> None:
        """Drop what is kept of copies whose numbers are not among these."""
        with self._lock:
            dropped = [key for key in self._kept if key[0] not in kept]
            if dropped:
                self._unused = [self._kept.pop(key).data for key in dropped]

    def keys(self) -> set[tuple[int, int]]:
        """Return number and device of each copy that is kept."""
        with self._lock:
            return set(self._kept)

    def states(self, number: int, device: int) -> dict[int, PackedState]:
        """Return the states of the layers in a copy that is kept."""
        with self._lock:
            return self._kept[number, device].states()


class _Sender:
    """Sends copies, the newest alone, from a thread of its own."""

    def __init__(self) -> None:
        self.newest_sent = NONE
        self._next: tuple[CopyOrder, StoreAddress, PackedCopy] | None = None
        self._changed = threading.Condition()
        self._end: socket.socket | None = None
        self._at: StoreAddress | None = None
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def send(self, order: CopyOrder, keeper: StoreAddress, copy: PackedCopy) -> None:
        with self._changed:
            self._next = order, keeper, copy
            self._changed.notify()

    def give_up(self) -> None:
        """Break the connection if something is still on its way."""
        with self._changed:
            if self._next is not None and self._end is not None:
                with suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)
            self._next = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                assert self._next is not None
                order, keeper, copy = self._next
            is_sent = self._send_again(order, keeper, copy)
            with self._changed:  # who sees that it is sent gives nothing up
                if is_sent:
                    self.newest_sent = order.number
                if self._next is not None and self._next[0] is order:
                    self._next = None

    def _send_again(self, order: CopyOrder, keeper: StoreAddress, copy: PackedCopy) -> bool:
        for is_connected in (True, False):  # what broke since the last copy shows only now
            if is_connected and self._end is None:
                continue
            try:
                self._send(order, keeper, copy)
            except OSError as error:
                _LOG.warning("%s did not reach %s: %s", order.text, keeper, error)
                self._hang_up()
            else:
                return True
        return False

    def _send(self, order: CopyOrder, keeper: StoreAddress, copy: PackedCopy) -> None:
        if self._end is None or self._at != keeper:
            self._hang_up()
            self._connect(order, keeper)
        assert self._end is not None
        header = json.dumps([order.number, order.device, order.kept, [list(vars(one).values()) for one in copy.tensors]]).encode()
        self._end.sendall(_LENGTH.pack(len(header)) + header)
        self._end.sendall(copy.data.data)
        if _LENGTH.unpack(_read(self._end, _LENGTH.size))[0] != order.number:
            raise OSError("the answer is to another copy")

    def _connect(self, order: CopyOrder, at: StoreAddress) -> None:
        deadline_s = time.monotonic() + _CALL_S

        def check() -> None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no connection within {_CALL_S:g} s")

        end = call(at.host, at.port, secret=at.secret, purpose=_PURPOSE, device=order.device, check=check)
        end.setblocking(True)
        with self._changed:
            self._end, self._at = end, at
            if self._next is None or self._next[0] is not order:
                raise TimeoutError("it was given up")  # and its memory may be that of the next one already

    def _hang_up(self) -> None:
        with self._changed:
            if self._end is not None:
                self._end.close()
            self._end = self._at = None


class _Listener:
    """Takes copies from processes that know the secret of the run."""

    def __init__(self, copies: StateCopies, host: str, secret: Secret) -> None:
        server = listening_at(host)
        self.address = StoreAddress(host, server.getsockname()[1], secret)
        self._copies = copies
        self._gate = Gate(server, secret=secret, purpose=_PURPOSE)
        threading.Thread(target=self._run, name="copies gate", daemon=True).start()

    def _run(self) -> None:
        while True:
            for one in self._gate.admit(_TICK_S):
                one.end.setblocking(True)
                threading.Thread(target=self._take_from, args=[one.end], name="copies", daemon=True).start()

    def _take_from(self, end: socket.socket) -> None:
        with end, suppress(OSError):
            while True:
                (length,) = _LENGTH.unpack(_read(end, _LENGTH.size))
                number, device, kept, tensors = json.loads(_read(end, length))
                copy = PackedCopy([_Tensor(*one) for one in tensors], self._copies.memory(tensors[-1][-1] if tensors else 0))
                _read_into(end, copy.data.data)
                self._copies.keep(number, device, kept, copy)
                end.sendall(_LENGTH.pack(number))


def _read(end: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _read_into(end, memoryview(data))
    return bytes(data)


def _read_into(end: socket.socket, view: memoryview) -> None:
    while view:
        got = end.recv_into(view)
        if not got:
            raise ConnectionError("closed by the other end")
        view = view[got:]
