"""Recovery: a run goes on after the loss of a device, a node or a link, without a person."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raypipe.actors.orders import BuildOrder
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.callbacks.events import RecoveredFailure
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import end_processes, spare_slots, unreached
from raypipe.cluster.slots import DeviceSlot, resources_per_device
from raypipe.cluster.state_copies import StateCopies
from raypipe.cluster.states import States, lie_only_on
from raypipe.cluster.window import WindowResult
from raypipe.config import FailureConfig
from raypipe.errors import FormatError, PlanError, RunError, StageRaisedError, StateLostError
from raypipe.training.adaptive import AdaptiveStrategy
from raypipe.training.cut_links import CutLinks, Pair
from raypipe.training.record import RunRecord
from raypipe.training.strategy import Strategy
from raypipe.training.sums import SumAdaptation

_LOG = logging.getLogger("raypipe.training.recovery")
_MOST_TRIES = 6  # of one recovery: another device may be lost meanwhile
_AVOID_S = 600.0  # until a node is used again on which an actor did not start; each further time four times as long
_LOOK_S = 5.0  # between two looks for devices that have come back
_REACH_S = 0.2  # for a node that was lost to take a connection at such a look


@dataclass(frozen=True)
class Source:
    """A state to go on from: that behind `update`, and the words for where it lies."""

    update: int
    states: States | Checkpoint | None
    text: str


@dataclass
class Recovery:
    """Brings a run back to a whole state after a failure, and counts failures.

    A lost actor is replaced on its node, else on one with room; else the run gets a plan for the devices that are left. State comes from
    the copies in the memory of nodes, else from the last checkpoint; a run that has none begins anew.

    Attributes:
        strategy: What runs; another one behind a call of `adopt`, which makes it that of the whole run.
        checkpoints: Returns those that the run may go back to; raises `OSError` while their storage cannot be reached.
        newest: Returns the newest of them, which needs no storage.
    """

    config: FailureConfig
    coordinator: Coordinator
    record: RunRecord
    sums: SumAdaptation
    strategy: Strategy
    copies: StateCopies
    build_order: Callable[[], BuildOrder]
    checkpoints: Callable[[], Sequence[Checkpoint]]
    newest: Callable[[], Checkpoint | None]
    adopt: Callable[[Strategy, int, str], None]
    num_failures: int = 0
    _begin_s: float = field(default_factory=time.monotonic)
    _num_struck: int = 0  # failures of the whole run
    _failed_after: int = -1  # the most updates that were done when something failed
    _raised: set[tuple[str, str, int]] = field(default_factory=set)
    _unusable: dict[str, float] = field(default_factory=dict)  # nodes on which actors did not start, and when
    _num_not_started: Counter[str] = field(default_factory=Counter)
    _looked_at_s: float = -math.inf
    _lost_nodes: set[str] = field(default_factory=set)  # in the last recovery; Ray may take them for alive for some time

    def __post_init__(self) -> None:
        self._first = self.strategy
        self._cut_links = CutLinks(self.coordinator.actors)
        self.copies.cut_links = self._cut_links

    def after_window(self, update: int, window: WindowResult) -> None:
        """Copy the state behind a window, and see that the run gets on."""
        if not self.config.max_failures:
            return
        if update > self._failed_after:
            self.num_failures = 0
            self._raised.clear()
            self._cut_links.trust()
        every_s = self._mtbf_s()
        if self.copies.after_window(update, seconds=window.wall_s, num_updates=window.num_updates, mtbf_s=every_s):
            self._take_back(update)
        if self.config.spare_processes is not False:
            nodes = self.coordinator.actors.nodes(with_idle_core=self.config.spare_processes is None)
            self.coordinator.spares.keep(dict.fromkeys(nodes, 1), self.build_order)

    def recover(self, error: RunError, *, update: int) -> int:
        """Bring the run back to a whole state after `error`, when `update` updates were done; return the update of that state.

        Raises:
            RunError: The failure is one too many, or no device or state is left to go on with.
        """
        self.record.count_failure(error, update)
        self._count(error, update)
        first, since_s = error, time.monotonic()
        self._lost_nodes.clear()
        for _ in range(_MOST_TRIES):
            try:
                source, changes = self._restore(error, update)
                break
            except PlanError as problem:
                raise RunError(f"{error}; the run cannot go on with the devices that are left: {problem}") from error
            except RunError as next_error:
                error = next_error
                self.record.notice(f"recovering failed, trying again: {error}")
        else:
            raise error
        seconds = time.monotonic() - since_s
        text = f"recovered in {seconds:.1f} s{changes}; going on from update {source.update} ({source.text})"
        self.copies.drop_after(source.update)
        self.copies.renew()  # what a lost node held now lies in one place only, and failures come in groups
        self.record.rewind(source.update)
        self.record.add_recovery(RecoveredFailure(update, source.update, source.text, seconds, text, str(first)))
        self.record.notice(text)
        return source.update

    def rewind(self, *, update: int) -> int:
        """Take the run, which nothing has struck, back to the newest whole state; return its update."""
        since_s = time.monotonic()
        self._num_struck += 1  # it goes back as far as behind a failure
        source, _ = self._restore(None, update)
        self.copies.drop_after(source.update)
        self.record.rewind(source.update)
        seconds, text = time.monotonic() - since_s, f"going on from update {source.update} ({source.text})"
        self.record.callbacks.recovery(RecoveredFailure(update, source.update, source.text, seconds, text, "a bad update is skipped"))
        return source.update

    def _mtbf_s(self) -> float:
        """Return the mean time between failures, had one come now; 0 while something is lost, which returns behind a copy."""
        if self.coordinator.actors.gone or self._cut_links:
            return 0.0
        return (time.monotonic() - self._begin_s) / (self._num_struck + 1)

    def _count(self, error: RunError, update: int) -> None:
        self._num_struck += 1
        self.num_failures += 1
        self._failed_after = max(self._failed_after, update)
        if self.num_failures > self.config.max_failures:
            raise error
        if isinstance(error, StageRaisedError):
            place = (error.stages, error.problem, update)
            if place in self._raised:
                raise _twice(error)  # the model's own fault, which it would repeat for ever
            self._raised.add(place)
        self.record.notice(f"failure {self.num_failures} of at most {self.config.max_failures} in a row: {error}")

    def _restore(self, error: RunError | None, update: int) -> tuple[Source, str]:
        actors = self.coordinator.actors
        suspects = [number for number, member in enumerate(actors.launched) if getattr(error, "device", "") == member.slot.name]
        self.coordinator.spares.hurry({actors.launched[number].slot.node.node_id for number in suspects})
        silent = actors.rest(suspects)
        changes = self._replace(silent)
        if actors.gone.intersection(self.strategy.devices):
            self._plan_anew(update)
        elif (nodes := self._cut_links.loses(error)) is not None:
            self._do_without_link(nodes, update)
        for source in self._sources():
            _LOG.info("restoring update %d from %s", source.update, source.text)
            actors.assign(self.strategy.devices, self.strategy.stages)
            programs, states = self.strategy.programs(), source.states
            try:
                if isinstance(states, Checkpoint):
                    states.check()
                self.coordinator.restore(
                    states.folder if isinstance(states, Checkpoint) else states,
                    order=self.build_order(),
                    programs=programs,
                    wiring=self.sums.begin(programs),
                    apart=self._apart(),
                )
            except (StateLostError, FormatError) as loss:
                self.record.notice(f"{source.text} cannot be used: {loss}")
                actors.rest([])
                continue
            return source, changes
        raise RunError("none of the run's checkpoints can be used, which stay; `--resume auto` tries again")

    def _replace(self, silent: Collection[int] = ()) -> str:
        return self._start_in(self._free_slots(silent))

    def _free_slots(self, silent: Collection[int] = ()) -> dict[int, DeviceSlot]:
        actors = self.coordinator.actors
        slots = [member.slot for member in actors.launched]
        # Ray takes a node that is cut off for alive until it has missed some of its reports.
        self._lost_nodes |= end_processes([(slots[number].node, actors.launched_infos[number].pid) for number in silent])
        lost_nodes = self._lost_nodes | {
            node_id
            for node_id, since_s in self._unusable.items()
            if time.monotonic() - since_s < _AVOID_S * 4 ** (self._num_not_started[node_id] - 1)
        }
        # A plan says by itself which of its devices are GPUs.
        needs = resources_per_device(replace(actors.scaling, use_gpu=any(slot.num_gpus for slot in slots)))
        return spare_slots(slots, sorted(actors.gone), needs, without=lost_nodes)

    def _start_in(self, slots: Mapping[int, DeviceSlot]) -> str:
        if not slots:
            return ""
        try:
            self.coordinator.replace(slots)
        except RunError:
            node_ids = {slot.node.node_id for slot in slots.values()}
            self._unusable |= dict.fromkeys(node_ids, time.monotonic())
            self._num_not_started.update(node_ids)
            raise
        return f" with new actors on {', '.join(slot.name for slot in slots.values())}"

    def _do_without_link(self, nodes: Pair, update: int) -> None:
        try:
            self._plan_anew(update)
        except PlanError as problem:
            self._cut_links.keep(nodes)
            self.record.notice(f"no plan does without the lost link ({problem}): trying again with it")

    def _plan_anew(self, update: int) -> None:
        """Choose a plan for the devices and links that are left."""
        coordinator, before, whole = self.coordinator, self.strategy, self._first
        topology, gone = whole.plan.topology, coordinator.actors.gone
        for nodes in self._cut_links:
            one, other = (self._names_on(node_id) for node_id in sorted(nodes))
            for pair in itertools.product(one - other, other - one):
                topology = topology.without_link(*pair)
        strategy = AdaptiveStrategy(before.config, before.model, window_sizes=before.schedules, start=whole, can_divide=False)
        strategy.prepare_without(coordinator, topology, lost=gone, notice=self.record.notice)
        left = len(whole.launched) - len(gone)
        self.adopt(strategy, update, f"{left} of {len(whole.launched)} devices are left" if gone else "a link is lost")

    def _apart(self) -> list[Pair]:
        """Return the pairs of nodes that do not reach each other: those with a cut link, and lost ones with all others."""
        nodes = {member.slot.node.node_id for member in self.coordinator.actors.alive().values()} - self._lost_nodes
        return [*self._cut_links, *(frozenset(pair) for pair in itertools.product(self._lost_nodes, nodes))]

    def _names_on(self, node_id: str) -> set[str]:
        """Return which nodes of the first plan's topology the devices on a node stand for: those that have moved for their old one."""
        whole = self._first
        launched = enumerate(self.coordinator.actors.launched)
        return {
            whole.plan.topology.node_of(whole.launched[number]).name for number, member in launched if member.slot.node.node_id == node_id
        }

    # Devices and links that come back

    def _take_back(self, update: int) -> None:
        """Use devices again whose nodes are back, or have room for them, and links whose nodes reach each other."""
        actors = self.coordinator.actors
        if not (actors.gone or self._cut_links) or time.monotonic() - self._looked_at_s < _LOOK_S:
            return
        self._looked_at_s = time.monotonic()
        lost = {slot.node for number in actors.gone if (slot := actors.launched[number].slot).node.node_id in self._lost_nodes}
        self._lost_nodes = unreached(lost, timeout_s=_REACH_S)
        is_link_back = self._cut_links.come_back()
        slots = self._free_slots()
        if slots and not self._is_prepared(slots):
            slots, self._looked_at_s = {}, -math.inf
        try:
            changes = self._start_in(slots)
        except RunError as error:
            self.record.notice(f"update {update}: going on without {', '.join(slot.name for slot in slots.values())}: {error}")
            changes = ""
        if not changes and not is_link_back:
            return
        if self.strategy is self._first:
            self.record.notice(f"update {update}: going on{changes}, which have nothing to do yet")
            return
        if actors.gone or self._cut_links:
            self._plan_anew(update)
        else:
            self.adopt(self._first, update, "all devices are back" if changes else "all links are back")
        strategy = self.strategy
        programs = strategy.programs()
        self.coordinator.move(
            strategy.devices,
            strategy.stages,
            order=self.build_order(),
            programs=programs,
            wiring=self.sums.begin(programs),
            apart=self._apart(),
        )
        self.record.notice(f"update {update}: going on{changes}")

    def _is_prepared(self, slots: Mapping[int, DeviceSlot]) -> bool:
        """Return whether processes for these slots have loaded their modules, which they do beside the next windows."""
        if self.config.spare_processes is False:
            return True
        spares, nodes = self.coordinator.spares, Counter(slot.node for slot in slots.values())
        spares.keep(nodes, self.build_order, is_urgent=True)  # the run waits for them
        return spares.are_ready(nodes)

    def _sources(self) -> Iterator[Source]:
        """Yield the states to go on from, the newest first; of the same update that in memory.

        Copies that are as new as any checkpoint need no storage, and come first; those of which parts went with a node come last, and only
        where there is no checkpoint.
        Nothing but the beginning is left to a run without checkpoints; one that has some never begins anew because they cannot be read at
        present.
        """
        newest = self.newest()
        saved = newest.index.update if newest is not None else 0
        copies, lost = list[Source](), list[Source]()
        for copy in self.copies.candidates():
            of_kind = lost if lie_only_on(self._lost_nodes, copy.states) else copies
            of_kind.append(Source(copy.update, copy.states, "the copies in memory"))
        yield from (copy for copy in copies if copy.update >= saved)
        if newest is None:
            yield from lost  # A node that was cut off may be back by now.
            yield Source(0, None, "the beginning")
            return
        found = [copy for copy in copies if copy.update < saved]
        try:
            for checkpoint in self.checkpoints():
                found.append(Source(checkpoint.index.update, checkpoint, f"the checkpoint {checkpoint.path}"))
        except OSError as problem:
            self.record.notice(f"the checkpoints cannot be read: {problem}")
        yield from sorted(found, key=lambda source: source.update, reverse=True)


def _twice(error: StageRaisedError) -> StageRaisedError:
    problem = f"{error.problem} (twice at the same place, so that no other device would help)"
    return StageRaisedError(error.device, error.stages, error.node, error.during, problem, error.remedy)
