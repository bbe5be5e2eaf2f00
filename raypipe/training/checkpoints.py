"""When a run saves its layers, how they are written while it goes on, and which checkpoints it keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.actors.stage.snapshot import write_layer
from raypipe.actors.stage.state import unpacked
from raypipe.artifacts.checkpoint_files import CheckpointIndex, FileSums, finished_folders, layer_file, remove_checkpoint
from raypipe.artifacts.storage import Storage
from raypipe.cluster.actor_group import Member
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.stage_actors import dead
from raypipe.cluster.state_copies import StateCopy
from raypipe.config import RunConfig
from raypipe.errors import FormatError, NonFiniteError, RaypipeError, RunError, RunTakenOverError
from raypipe.training.run_cluster import Notice
from raypipe.training.run_folder import RunFolder
from raypipe.training.run_lock import RunLock
from raypipe.units import counted, size

_LOOK_S = 10.0  # between two looks at actors that write
_COPY_S = 60.0  # for the nodes to hand out a copy of the state
_TELL_S = 300.0  # between two words on a checkpoint that is still being written
_WRITE_S = 3600.0  # for the actors to write one


class _Writing:
    """A checkpoint that actors write in the background; the last step, its index, is done by a thread of this process."""

    def __init__(
        self, folder: Storage, calls: Mapping[Any, Member], index: CheckpointIndex, lock: RunLock, *, silence_timeout_s: float
    ) -> None:
        self.folder, self.index = folder, index
        self.checkpoint: Checkpoint | None = None
        self.problem: Exception | None = None
        self.seconds = 0.0
        self.writers: tuple[str, ...] = ()  # devices that had not written their parts at the last look
        self._calls, self._lock, self._silence_timeout_s = calls, lock, silence_timeout_s
        self._since_s = time.monotonic()
        self._thread = threading.Thread(target=self._finish, name=f"checkpoint {index.update}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def passed_s(self) -> float:
        """Seconds since it was begun."""
        return time.monotonic() - self._since_s

    def wait(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _finish(self) -> None:
        try:
            files: dict[str, FileSums] = {}
            for of_actor in self._answers():
                files |= of_actor
            expected = {layer_file(number, name) for number, name in enumerate(self.index.layers)}
            if missing := sorted(expected - files.keys()):
                raise RunError(f"no device has written {', '.join(missing)}")
            self._lock.check()
            self.checkpoint = Checkpoint.finish(self.folder, dataclasses.replace(self.index, files=files))
        except RayTaskError as error:
            self.problem = error.cause if isinstance(error.cause, RaypipeError) else error
        except Exception as error:  # told by the thread that trains
            self.problem = error
        # Whoever took the run over may have written the same update by now.
        if self.problem is not None and not isinstance(self.problem, RunTakenOverError):
            with contextlib.suppress(OSError):
                remove_checkpoint(self.folder)
        self.seconds = self.passed_s

    def _answers(self) -> list[dict[str, FileSums]]:
        # Storage may be slow, and a file system that hangs keeps a writer for ever, whose actor goes on telling its status.
        pending = list(self._calls)
        while pending:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=_LOOK_S)
            writers = [self._calls[ref] for ref in pending]
            self.writers = tuple(member.slot.name for member in writers)
            if silent := dead(dict(enumerate(writers)), timeout_s=self._silence_timeout_s):
                names = ", ".join(writers[number].slot.name for number in silent)
                raise RunError(f"no answer from {counted(len(silent), 'device')} that wrote it: {names}")
            if pending and self.passed_s > _WRITE_S:
                names = ", ".join(self.writers)
                raise RunError(f"{names} did not write it within {_WRITE_S:.0f} s; look at the storage of {self.folder.name}")
        answers: list[dict[str, FileSums]] = ray.get(list(self._calls))
        return answers


class Checkpoints:
    """The checkpoints of a run.

    Args:
        index: What all checkpoints of the run have in common.
        resumed: The checkpoint that the run goes on from.
        on_saved: Called between windows with each checkpoint that is complete, and the seconds of writing it; once more if it raised.
        position: Returns where the training data goes on behind an update, if a checkpoint has to say.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: RunLock,
        config: RunConfig,
        *,
        index: CheckpointIndex,
        resumed: Checkpoint | None,
        notice: Notice,
        on_saved: Callable[[Checkpoint, float], None],
        position: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self.newest = resumed
        self._on_saved = on_saved
        self._position = position
        self._folder, self._lock, self._config, self._index, self._notice = folder, lock, config, index, notice
        self._writing: _Writing | None = None
        self._told_after_s = 0.0  # of the checkpoint that is being written, since it was begun
        self._untold: deque[tuple[Checkpoint, float]] = deque()
        self._since_s = time.monotonic()

    def begin(self) -> None:
        """Count the time to the first checkpoint from now on."""
        self._since_s = time.monotonic()

    def is_due(self, update: int) -> bool:
        """Return whether the configuration asks for a checkpoint after this update; one by time waits for the one before it."""
        every, every_s = self._config.checkpoint_every, self._config.checkpoint_every_s
        if every and update % every == 0:
            return True
        return bool(every_s) and self._writing is None and time.monotonic() - self._since_s >= every_s

    def save(self, coordinator: Coordinator, update: int, metrics: Mapping[str, float]) -> None:
        """Copy all layers, and have the copies written while the next windows run; one that is still being written comes first."""
        self.wait()
        self._tell()
        if self.newest is not None and self.newest.index.update == update:
            return
        self._since_s = time.monotonic()
        self._lock.check()
        coordinator.take_snapshot()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        index = dataclasses.replace(self._index, update=update, metrics=finite, data=self._position(update))
        try:
            folder = self._folder.new_checkpoint(update)
        except OSError as error:
            self._notice(_not_saved(update, error))
            return
        calls, silence_timeout_s = coordinator.write_snapshot(folder), coordinator.cluster.silence_timeout_s
        self._writing = _Writing(folder, calls, index, self._lock, silence_timeout_s=silence_timeout_s)
        self._told_after_s = 0.0

    def save_copy(self, copies: Sequence[StateCopy], *, reason: str) -> None:
        """Write the newest copy in the memory of nodes that can be had, if the run ends here and it is newer than all checkpoints.

        What goes wrong is told to `notice`: there is nothing else to do about it.
        """
        saved = self.newest.index.update if self.newest is not None else 0
        writing = self._writing.index.update if self._writing is not None else 0
        for copy in copies:
            if copy.update > max(saved, writing):
                self._notice(f"{reason}: writing the copy of update {copy.update} that is in memory")
                if self._write_copy(copy):
                    return
        if writing > saved:
            self._notice(f"{reason}: waiting for the checkpoint of update {writing}")
            self.give_time(_COPY_S)

    def _write_copy(self, copy: StateCopy) -> bool:
        """Write a copy, of which parts may be lost; return whether that is done."""
        update, began_s = copy.update, time.monotonic()
        deadline = began_s + _COPY_S
        try:
            self._lock.check()
            folder = self._folder.new_checkpoint(update)
            files: dict[str, FileSums] = {}
            for layer, parts in copy.states.items():
                found = [unpacked(part) for part in ray.get(list(parts), timeout=max(deadline - time.monotonic(), 0.0))]
                state = {name: tensor for part in found for name, tensor in part.items()}
                files |= write_layer(folder, layer, self._index.layers[layer], state)
            self.newest = Checkpoint.finish(
                folder, dataclasses.replace(self._index, update=update, files=files, data=self._position(update))
            )
            self._untold.append((self.newest, time.monotonic() - began_s))
        except (OSError, RunError, RayError) as error:
            self._notice(_not_saved(update, error))
            return False
        return True

    def known(self) -> Checkpoint | None:
        """Return the newest checkpoint that this run may go back to, without a look at the storage."""
        self._settle_if_done()
        return self.newest

    def usable(self) -> list[Checkpoint]:
        """Return the checkpoints that this run may go back to: its newest one and those before; raises `OSError`."""
        self._settle_if_done()
        if self.newest is None:
            return []
        return [checkpoint for checkpoint in self._readable() if checkpoint.index.update <= self.newest.index.update]

    def _readable(self) -> list[Checkpoint]:
        found: list[Checkpoint] = []
        for folder in finished_folders(self._folder.storage):
            with contextlib.suppress(FormatError):
                found.append(Checkpoint.open(folder))
        return found

    def poll(self) -> None:
        """Tell, between two windows, of a checkpoint that has been written since, or takes long."""
        self._settle_if_done()
        self._tell()
        if (writing := self._writing) is not None and writing.passed_s > self._told_after_s + _TELL_S:
            self._told_after_s = writing.passed_s
            names = ", ".join(writing.writers) or "all devices"
            self._notice(f"update {writing.index.update} is being written for {writing.passed_s:.0f} s; not done: {names}")

    def _settle_if_done(self) -> None:
        if self._writing is not None and self._writing.is_done:
            self._settle(self._writing)

    def _tell(self) -> None:
        # Callbacks use the model that the stages hold: one that fails with a device is told again once the run has recovered.
        while self._untold:
            self._on_saved(*self._untold[0])
            self._untold.popleft()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.wait()
            self._settle(self._writing)

    def give_time(self, seconds: float) -> None:
        """Wait a while for a checkpoint that is being written, before a run that failed ends its actors."""
        if self._writing is not None:
            self._writing.wait(seconds)
            self._settle_if_done()

    def finish(self, update: int) -> Checkpoint:
        """Wait for the checkpoint of the last update, and return it.

        Raises:
            RunError: It could not be written; says why and what there is instead.
            NonFiniteError: The weights are of no use, which doing the updates again would not change.
        """
        problem = None
        if self._writing is not None:
            writing = self._writing
            self.wait()
            problem = writing.problem
        self._tell()
        if self.newest is None or self.newest.index.update != update:
            there = f"the last checkpoint is {self.newest.path}" if self.newest is not None else "there is no other checkpoint"
            kind = NonFiniteError if isinstance(problem, NonFiniteError) else RunError
            raise kind(f"update {update} was not saved ({problem or 'its folder could not be made'}); {there}") from problem
        return self.newest

    def _settle(self, writing: _Writing) -> None:
        self._writing = None
        if writing.checkpoint is None:
            assert writing.problem is not None, "a checkpoint is written, or says why not"
            self._notice(_not_saved(writing.index.update, writing.problem))
            return
        self.newest = writing.checkpoint
        self._untold.append((writing.checkpoint, writing.seconds))
        num_bytes = sum(file.size_bytes for file in writing.checkpoint.index.files.values())
        self._notice(f"saved update {writing.index.update}: {size(num_bytes)} written in {writing.seconds:.1f} s")
        try:
            self._folder.publish()
            self._remove_old()
        except OSError as error:
            self._notice(f"{self._folder.name}: an old checkpoint or a record could not be replaced ({error})")

    def _remove_old(self) -> None:
        keep, by = self._config.num_to_keep, self._config.keep_best_by
        if not keep:
            return
        # Checkpoints that cannot be read are neither counted nor removed.
        found = sorted(self._readable(), key=lambda checkpoint: checkpoint.index.update)
        kept = {checkpoint.path for checkpoint in found[-keep:]}
        if by is not None and (best := Checkpoint.best_of(found, by)) is not None:
            kept.add(best.path)
        for checkpoint in found:
            if checkpoint.path not in kept:
                remove_checkpoint(checkpoint.folder)


def _not_saved(update: int, problem: Exception) -> str:
    return f"update {update} was not saved: {problem}; earlier checkpoints stay"
