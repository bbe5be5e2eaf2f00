"""Recovery: a run goes on after the loss of a device, a node or a link, without a person."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from raypipe.actors.orders import BuildOrder
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.storage import Storage
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import spare_slots
from raypipe.cluster.slots import resources_per_device
from raypipe.cluster.state_copies import StateCopies, States
from raypipe.config import FailureConfig
from raypipe.errors import RunError, StageRaisedError, StateLostError
from raypipe.training.record import RunRecord
from raypipe.training.strategy import Strategy
from raypipe.training.sums import SumAdaptation

_LOG = logging.getLogger("raypipe.training.recovery")


@dataclass(frozen=True)
class Source:
    """A state to go on from: that behind `update`, and the words for where it lies."""

    update: int
    states: States | Storage | None
    text: str


@dataclass
class Recovery:
    """Brings a run back to a whole state after a failure, and counts failures.

    State comes from the copies in the memory of nodes, else from the last checkpoint, else the run begins anew.
    """

    config: FailureConfig
    coordinator: Coordinator
    record: RunRecord
    sums: SumAdaptation
    copies: StateCopies
    build_order: Callable[[], BuildOrder]
    checkpoint: Callable[[], Checkpoint | None]
    num_failures: int = 0
    _failed_after: int = -1  # the most updates that were done when something failed
    _raised: set[tuple[str, str, int]] = field(default_factory=set)

    def after_window(self, update: int) -> None:
        """Copy the state behind a window, and see that the run gets on."""
        if not self.config.max_failures:
            return
        if update > self._failed_after:
            self.num_failures = 0
            self._raised.clear()
        self.copies.take(update)

    def recover(self, error: RunError, strategy: Strategy, *, update: int) -> int:
        """Bring the run back to a whole state; return its update.

        Args:
            error: What ended the window.
            strategy: What runs; its devices may be others afterwards.
            update: Updates that are done.

        Raises:
            RunError: The failure is one too many, or no state or device is left to go on with.
        """
        while True:
            self._count(error, update)
            since_s = time.monotonic()
            try:
                source, replaced = self._restore(strategy, error)
            except RunError as next_error:
                if isinstance(next_error, StateLostError):
                    raise
                error = next_error
                continue
            seconds = time.monotonic() - since_s
            text = f"recovered in {seconds:.1f} s from: {error}; {replaced}going on from update {source.update} ({source.text})"
            self.record.rewind(source.update)
            self.record.add_failure({
                "update": update,
                "text": text,
                "error": str(error),
                "from_update": source.update,
                "source": source.text,
                "recovered_s": seconds,
            })
            self.record.listener.notice(text)
            return source.update

    def _count(self, error: RunError, update: int) -> None:
        self.num_failures += 1
        self._failed_after = max(self._failed_after, update)
        if self.num_failures > self.config.max_failures:
            raise error
        if isinstance(error, StageRaisedError):
            place = (error.stages, error.problem, update)
            if place in self._raised:
                raise _twice(error)  # the model's own fault, which it would repeat for ever
            self._raised.add(place)
        self.record.listener.notice(f"failure {self.num_failures} of at most {self.config.max_failures} in a row: {error}")

    def _restore(self, strategy: Strategy, error: RunError) -> tuple[Source, str]:
        coordinator, actors = self.coordinator, self.coordinator.actors
        suspects = [number for number, member in enumerate(actors.launched) if getattr(error, "device", "") == member.slot.name]
        lost = actors.rest(suspects)
        replaced = ""
        if lost:
            slots = spare_slots([member.slot for member in actors.launched], lost, resources_per_device(actors.scaling))
            coordinator.replace(slots)
            replaced = f"new actors on {', '.join(slot.name for slot in slots.values())}; "
        for source in self._sources():
            _LOG.info("restoring update %d from %s", source.update, source.text)
            coordinator.actors.assign(strategy.devices, strategy.stages)
            programs = strategy.programs()
            try:
                coordinator.restore(source.states, order=self.build_order(), programs=programs, patterns=self.sums.begin(programs))
            except StateLostError as loss:
                _LOG.warning("%s cannot be used: %s", source.text, loss)
                actors.rest([])
                continue
            return source, replaced
        raise AssertionError("a run can always begin anew")

    def _sources(self) -> Iterator[Source]:
        for copy in self.copies.candidates():
            yield Source(copy.update, copy.states, "the copies in memory")
        self.copies.forget()
        if (checkpoint := self.checkpoint()) is not None:
            yield Source(checkpoint.index.update, checkpoint.folder, f"the checkpoint {checkpoint.path}")
        else:
            yield Source(0, None, "the beginning")


def _twice(error: StageRaisedError) -> StageRaisedError:
    problem = f"{error.problem} (twice at the same place, so that no other device would help)"
    return StageRaisedError(error.device, error.stages, error.node, error.during, problem, error.remedy)
