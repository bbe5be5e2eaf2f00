"""The lock of a run's folder: one process writes it at a time.

The file `run.lock` names its owner. A lock outlives an owner that is killed, and is then stale: on the machine of the owner if its process
is gone, elsewhere if the owner has not renewed the file for a while. Times of the file are compared with each other alone, so that the
clocks of machines need not agree.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from raypipe.artifacts import codec
from raypipe.artifacts.record import record
from raypipe.artifacts.storage import Storage
from raypipe.errors import ConfigError, FormatError, RunTakenOverError

FORMAT = "raypipe.lock/1"
LOCK = "run.lock"
_RENEW_S = 10.0
_STALE_S = 60.0
# No object store makes a file only if there is none: of two that write at once, the one that is read back wins.
_SETTLE_S = 1.0


@record()
class LockOwner:
    """Who holds a lock.

    Attributes:
        machine: Identity of the running system and of its space of process numbers.
        began: When the process began, in the system's own measure; a number of a process comes again.
        token: Text unique to the holding.
    """

    host: str
    machine: str
    pid: int
    began: str
    token: str

    @classmethod
    def here(cls) -> LockOwner:
        """Return this process as the owner of a new lock."""
        pid = os.getpid()
        return cls(host=os.uname().nodename, machine=_machine(), pid=pid, began=_began(pid), token=uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    @property
    def is_gone(self) -> bool | None:
        """Whether the owner's process has ended; `None` if that cannot be seen from this machine."""
        if self.machine != _machine():
            return None
        return _began(self.pid) != self.began


def living_owner(folder: Storage) -> LockOwner | None:
    """Return who holds the lock of a folder and is not known to be gone; one on another machine may have died within the last minute."""
    try:
        owner = _owner(folder)
        is_gone = owner.is_gone
        if is_gone is None:
            is_gone = time.time() - folder.changed_s(LOCK) > _STALE_S
    except (OSError, FormatError):
        return None
    return None if is_gone else owner


def _owner(folder: Storage, name: str = LOCK) -> LockOwner:
    text = folder.read(name).decode(errors="replace")
    return codec.from_json(LockOwner, text, path=f"{folder.name}/{name}", format_name=FORMAT)


class RunLock:
    """The lock of one folder, while this process holds it.

    Args:
        renew_s: Seconds between two signs of life.
        stale_s: Seconds without a sign of life after which an owner on another machine is taken for dead.
    """

    def __init__(self, folder: Storage, *, renew_s: float = _RENEW_S, stale_s: float = _STALE_S, settle_s: float = _SETTLE_S) -> None:
        self.folder = folder
        self.owner = LockOwner.here()
        self._renew_s, self._stale_s, self._settle_s = renew_s, stale_s, settle_s
        self._ended = threading.Event()
        self._lost: str | None = None
        self._thread: threading.Thread | None = None

    def acquire(self, notice: Callable[[str], None]) -> None:
        """Take the lock, also from an owner that is gone; tell `notice` so.

        Raises:
            ConfigError: Another process holds it: names its host.
        """
        try:
            self.folder.make()
            if not self._make():
                self._take_over(notice)
        except OSError as error:
            raise ConfigError(f"{self.folder.name}/{LOCK} cannot be written ({error}); choose another run.storage_path") from None
        self._thread = threading.Thread(target=self._keep, name="run lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `RunTakenOverError` if another process has taken the lock, as happens to one that was suspended for long."""
        if self._lost is not None:
            raise RunTakenOverError(
                f"{self.folder.name}: {self._lost} has taken over this run while this process did not answer; it goes on there"
            )

    def release(self) -> None:
        """Give the lock back; may be called twice."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        with contextlib.suppress(OSError, FormatError):
            if self._lost is None and self._read().token == self.owner.token:
                self.folder.remove(LOCK)

    def _make(self) -> bool:
        content = codec.to_json(self.owner, format_name=FORMAT).encode()
        if self.folder.is_local:
            try:
                with Path(self.folder.path, LOCK).open("xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
            return True
        if self.folder.size(LOCK) is not None:
            return False
        self.folder.write(LOCK, content)
        time.sleep(self._settle_s)
        return self._read().token == self.owner.token

    def _take_over(self, notice: Callable[[str], None]) -> None:
        try:
            seen = self._look(LOCK)
        except FileNotFoundError:
            seen = None, 0.0
        owner, _ = seen
        is_gone = owner.is_gone if owner is not None else None
        silent_s = self._silent_s()
        if is_gone is False or (is_gone is None and silent_s < self._stale_s):
            raise ConfigError(
                f"{self.folder.name} is being written by {owner or 'another process'}, which gave a sign of life {silent_s:.0f} s ago; "
                "wait for its end, stop it, or choose another run.name"
            )
        if not self._remove_stale(seen) or not self._make():
            raise ConfigError(f"{self.folder.name} is being written by another process, which has just begun; wait for its end")
        gone = "which has ended" if is_gone else f"which has been silent for {silent_s:.0f} s"
        notice(f"{self.folder.name} was locked by {owner or 'a process'}, {gone}: taken over")

    def _look(self, name: str) -> tuple[LockOwner | None, float]:
        """Return the owner of a lock, `None` if its owner is just writing it or was killed there, and when it was last written."""
        changed_s = self.folder.changed_s(name)
        try:
            return _owner(self.folder, name), changed_s
        except FormatError:
            return None, changed_s

    def _remove_stale(self, seen: tuple[LockOwner | None, float]) -> bool:
        """Remove the lock that was seen; return `False` if it is another one now, since another process has taken it over meanwhile."""
        if not self.folder.is_local:
            with contextlib.suppress(FileNotFoundError):
                self.folder.remove(LOCK)
            return True
        # Of several processes that rename it one succeeds, and only then is it sure whose lock that was.
        lock, aside = (Path(self.folder.path, name) for name in (LOCK, self._own_name))
        try:
            lock.rename(aside)
        except FileNotFoundError:
            return False
        is_same = False
        try:
            is_same = self._look(aside.name) == seen
        finally:
            if not is_same:
                _put_back(aside, lock)
            aside.unlink(missing_ok=True)
        return is_same

    @property
    def _own_name(self) -> str:
        return f"{LOCK}.{self.owner.token}"

    def _silent_s(self) -> float:
        # Both times are those of whoever keeps the files.
        name = self._own_name
        self.folder.write(name, b"")
        try:
            return self.folder.changed_s(name) - self.folder.changed_s(LOCK)
        except FileNotFoundError:
            return 0.0
        finally:
            self.folder.remove(name)

    def _read(self) -> LockOwner:
        return _owner(self.folder)

    def _keep(self) -> None:
        while not self._ended.wait(self._renew_s):
            # A network that is away for a while is no reason to give the run up.
            with contextlib.suppress(OSError, FormatError):
                if (owner := self._read()).token != self.owner.token:
                    self._lost = str(owner)
                    return
                self._renew()

    def _renew(self) -> None:
        if self.folder.is_local:
            os.utime(Path(self.folder.path, LOCK))
        else:
            self.folder.write(LOCK, codec.to_json(self.owner, format_name=FORMAT).encode())


def _put_back(aside: Path, lock: Path) -> None:
    # A process that began in this very moment keeps the lock that it has made: the owner of the other learns so when it renews it.
    try:
        os.link(aside, lock)
    except FileExistsError:
        pass
    except OSError:  # the file system has no hard links
        aside.rename(lock)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return os.uname().nodename


def _began(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    # A process that has ended and was not waited for is a zombie.
    return "" if fields[0] in {"Z", "X"} else fields[19]
