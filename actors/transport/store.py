"""Where the processes of a run tell each other addresses: names and values that one of them keeps.

It takes the place of torch's store, which listens at all interfaces and lets everybody read and write. Callers come through a `Gate`.

    request     words: set NAME VALUE ... | get SECONDS NAME ... | add NAME NUMBER | compare NAME EXPECTED VALUE | delete NAME | count
    answer      words; those of `get` come once all names have values, or none when the seconds are over
"""

from __future__ import annotations

import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]  # public, says the manual

from raypipe.actors.transport.gate import Gate, call
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.errors import RunError

PURPOSE = "the store"
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 64 << 20
"""Of a request or answer: addresses of thousands of devices."""
_READ_BYTES = 1 << 16
_TAKE_WITHIN_S = 5.0
_WAIT_S = 0.5
_POLL_MS = 20
_TICK_S = 1.0


class _MalformedError(ValueError):
    """Not words as `_packed` writes them."""


def _packed(words: Sequence[bytes]) -> bytes:
    content = b"".join(_LENGTH.pack(len(word)) + word for word in words)
    return _LENGTH.pack(len(content)) + content


def _unpacked(content: bytes) -> list[bytes]:
    words: list[bytes] = []
    place = 0
    while place < len(content):
        if place + _LENGTH.size > len(content):
            raise _MalformedError
        (length,) = _LENGTH.unpack_from(content, place)
        place += _LENGTH.size
        if place + length > len(content):
            raise _MalformedError
        words.append(content[place : place + length])
        place += length
    return words


def _first_frame(came: bytearray) -> bytes | None:
    if len(came) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(came)
    if length > _MOST_BYTES:
        raise _MalformedError
    if len(came) < _LENGTH.size + length:
        return None
    content = bytes(came[_LENGTH.size : _LENGTH.size + length])
    del came[: _LENGTH.size + length]
    return content


@dataclass(eq=False)
class _Client:
    end: socket.socket
    came: bytearray = field(default_factory=bytearray)
    wanted: list[bytes] = field(default_factory=list)
    missing: set[bytes] = field(default_factory=set)
    deadline_s: float = 0.0


class StoreServer:
    """Keeps names and values, and serves them in a thread, until `close` or the end of the process.

    Args:
        host: Address of this node that the others reach; it listens there alone.
        secret: What callers prove to know.

    Raises:
        RunError: This host has no such address.
    """

    def __init__(self, host: str, *, secret: Secret) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = socket.create_server((host, 0), family=family)
        except OSError as error:
            problem = f"no socket can listen at {host}, which Ray says is this node's address ({error.strerror or error})"
            raise RunError(f"{problem}; start Ray with --node-ip-address at an address that the node has") from error
        self.address = StoreAddress(host, server.getsockname()[1], secret)
        self._gate = Gate(server, secret=secret, purpose=PURPOSE)
        self._values: dict[bytes, bytes] = {}
        self._unneeded: deque[bytes] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._gate, selectors.EVENT_READ)
        self._wakes, self._waker = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._waiting: set[_Client] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="raypipe store", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; what was kept is gone."""
        self._closing = True
        with suppress(OSError):  # closed before
            self._waker.send(b"x")
        self._thread.join()

    def drop(self, prefix: str) -> None:
        """Forget, within a second, the names that begin so and their values: nobody asks for them any more. Called from any thread."""
        self._unneeded.append(prefix.encode())

    def _serve(self) -> None:
        clients: set[_Client] = set()
        try:
            while not self._closing:
                soonest_s = min((client.deadline_s for client in self._waiting), default=time.monotonic() + _TICK_S)
                for key, _ in self._selector.select(min(max(soonest_s - time.monotonic(), 0.0), _TICK_S)):
                    if isinstance(key.data, _Client) and not self._read(key.data):
                        self._selector.unregister(key.data.end)
                        self._waiting.discard(key.data)
                        clients.discard(key.data)
                        key.data.end.close()
                for _, end in self._gate.admit():
                    clients.add(client := _Client(end))
                    self._selector.register(end, selectors.EVENT_READ, client)
                now_s = time.monotonic()
                for client in [client for client in self._waiting if client.deadline_s <= now_s]:
                    self._waiting.discard(client)
                    _send(client.end, [])
                while self._unneeded:
                    prefix = self._unneeded.popleft()
                    self._values = {name: value for name, value in self._values.items() if not name.startswith(prefix)}
        finally:
            self._selector.close()
            self._gate.close()
            self._wakes.close()
            self._waker.close()
            for client in clients:
                client.end.close()

    def _read(self, client: _Client) -> bool:
        """Answer what a client asks; return whether it goes on."""
        try:
            got = client.end.recv(_READ_BYTES)
            client.came += got
            while (frame := _first_frame(client.came)) is not None:
                self._answer(client, _unpacked(frame))
        except BlockingIOError:
            return True
        except (OSError, ValueError, IndexError):
            return False
        return bool(got)

    def _answer(self, client: _Client, words: list[bytes]) -> None:
        values = self._values
        match words:
            case [b"set", *pairs]:
                self._keep(dict(zip(pairs[::2], pairs[1::2], strict=True)))
                _send(client.end, [])
            case [b"get", seconds, *names]:
                client.wanted, client.missing = names, {name for name in names if name not in values}
                client.deadline_s = time.monotonic() + float(seconds)
                if client.missing:
                    self._waiting.add(client)
                else:
                    _send(client.end, [values[name] for name in names])
            case [b"add", name, number]:
                total = b"%d" % (int(values.get(name, b"0")) + int(number))
                self._keep({name: total})
                _send(client.end, [total])
            case [b"compare", name, expected, value]:
                # As torch's stores do: a name without a value takes one where nothing was expected.
                kept = values.get(name)
                if kept == expected or (kept is None and not expected):
                    self._keep({name: value})
                    kept = value
                _send(client.end, [expected if kept is None else kept])
            case [b"delete", name]:
                _send(client.end, [b"%d" % (values.pop(name, None) is not None)])
            case [b"count"]:
                _send(client.end, [b"%d" % len(values)])
            case _:
                raise _MalformedError

    def _keep(self, pairs: dict[bytes, bytes]) -> None:
        self._values.update(pairs)
        for client in list(self._waiting):
            client.missing -= pairs.keys()
            if not client.missing and all(name in self._values for name in client.wanted):
                self._waiting.discard(client)
                _send(client.end, [self._values[name] for name in client.wanted])


def _send(end: socket.socket, words: Sequence[bytes]) -> None:
    """Answer a client, which has room for it unless it stopped reading; such a client loses its connection."""
    end.settimeout(_TAKE_WITHIN_S)
    try:
        end.sendall(_packed(words))
        end.setblocking(False)
    except OSError:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # its next read says so


class StoreClient(Store):
    """A connection with a `StoreServer`, as torch's process groups want it.

    Used by one thread at a time. Torch keeps no Python object alive: whoever makes a group with it holds it until the group is made.

    Args:
        address: Where the server is.
        device: Who calls.
        check: Raises what ends a wait; called many times a second.

    Raises:
        OSError: Nobody answers there, or does not know the secret.
    """

    def __init__(self, address: StoreAddress, *, device: int, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check
        self._end = call(address.host, address.port, secret=address.secret, purpose=PURPOSE, device=device, check=check)
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came = bytearray()
        self._poll = select.poll()
        self._poll.register(self._end, select.POLLIN)
        self._lock = threading.Lock()

    def find(self, names: Sequence[str], *, wait_s: float) -> list[bytes] | None:
        """Return the values of names, `None` if they do not all have one within some seconds."""
        answer = self._ask(b"get", b"%.3f" % wait_s, *(name.encode() for name in names))
        return answer if len(answer) == len(names) else None

    def shut_down(self) -> None:
        """End the connection and every wait for it. Called from any thread."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._end.close()

    def _ask(self, *words: bytes) -> list[bytes]:
        with self._lock:
            self._end.sendall(_packed(words))
            while (frame := _first_frame(self._came)) is None:
                if self._poll.poll(_POLL_MS):
                    got = self._end.recv(_READ_BYTES)
                    if not got:
                        self._check()  # an abort ended it
                        raise ConnectionError("the store closed the connection")
                    self._came += got
                self._check()
            return _unpacked(frame)

    # What torch calls

    def set(self, name: str, value: str | bytes) -> None:
        """Keep a value."""
        self._ask(b"set", name.encode(), _bytes(value))

    def get(self, name: str) -> bytes:
        """Wait for a value."""
        return self.multi_get([name])[0]

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Wait for values."""
        while (values := self.find(names, wait_s=_WAIT_S)) is None:
            self._check()
        return values

    def multi_set(self, names: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Keep values."""
        for name, value in zip(names, values, strict=True):
            self.set(name, value)

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until names have values; `check` of the constructor ends it, whatever torch's limit."""
        self.multi_get(names)

    def check(self, names: Sequence[str]) -> bool:
        """Return whether all names have values."""
        return self.find(names, wait_s=0.0) is not None

    def add(self, name: str, number: int) -> int:
        """Add to a number, 0 at first; return the total."""
        return int(self._ask(b"add", name.encode(), b"%d" % number)[0])

    def compare_set(self, name: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Keep a value if the one there is as expected; return the one that is there then."""
        return self._ask(b"compare", name.encode(), _bytes(expected), _bytes(value))[0]

    def delete_key(self, name: str) -> bool:
        """Drop a value; return whether there was one."""
        return self._ask(b"delete", name.encode()) == [b"1"]

    def num_keys(self) -> int:
        """Return how many values there are."""
        return int(self._ask(b"count")[0])

    def has_extended_api(self) -> bool:
        """Return that several names can be asked for at once."""
        return True


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
