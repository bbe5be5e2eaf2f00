"""How a run goes on: in how many pipelines, with which order, cut and division of its rows, on which devices.

Between two windows the policy takes the facts of now, layer times, speeds of devices, bandwidths of links, and asks the planner for the
best way to run under them. It is content to stay, for a switch costs time and every figure is noisy:

    facts     after the first look nothing is searched before a link, a device or the error of the predictions has changed by a seventh
    gain      the other way must be predicted faster by more than `least_gain`, with both predictions corrected by what was measured of
              them when they ran
    twice     unless the gain is large, two windows one after the other must say so
    horizon   what the switch saves until the run ends, or within the horizon, must exceed what it costs

What was tried and turned out slower than predicted is remembered, and undone by the same rules.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

import numpy as np

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.errors import InputError, PlanError
from raypipe.planning import chunks
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import PlanCheck, ScheduleCache, layout_schedule, window_updates
from raypipe.planning.planners import AUTO
from raypipe.planning.problem import Floats, Problem
from raypipe.planning.schedule_search import climbed
from raypipe.planning.search import Budget
from raypipe.planning.solve import solve
from raypipe.schedules.ir import UpdateScope
from raypipe.simulation.plan_cost import STATE_BYTES_PER_PARAMETER_BYTE

_CHANGED = 1.15
"""By how much a fact must change to be looked at."""
_NO_LIMIT_BYTES_PER_S = 1e30
"""Stands for a link without limit, so that what changes to or from one is finite."""
_UNSTATED = math.log(1e12)
"""No link that has a limit changes by such a factor."""
_SURE_GAIN = 1.25
"""A gain for which one window is enough."""
_WINDOWS = 3
"""Of the last so many windows the median says how wrong predictions are."""
_MOST_WRONG = 4.0
_FIRST_EFFORT = 0.3
_EFFORT = 0.05
"""How hard the planner searches at first, and between windows; 1 is what `raypipe plan` does."""
_FEW_DEVICES = 4
_STEPS = 3
_MOST_SWAPS = 60
"""Besides, from each way that ran, the best of the changes of one thing is taken so often."""
_SWITCH_S = 3.0
"""What a switch is taken to cost, besides the bytes that it moves, before one was made."""


@dataclass(frozen=True)
class Choice:
    """A way to run.

    Attributes:
        num_microbatches: of an update.
        microbatch_size: rows of each.
        layout: stages on workers on devices, and the name of the order.
        rows: for each worker, those of each of its devices.
    """

    num_microbatches: int
    microbatch_size: int
    layout: Layout
    rows: tuple[tuple[int, ...], ...]

    @property
    def division(self) -> tuple[int, int]:
        """How the rows of an update are divided: microbatches, and rows of each."""
        return self.num_microbatches, self.microbatch_size


@dataclass(frozen=True)
class Facts:
    """What is known now.

    Attributes:
        profile: of the layers.
        topology: with the current speeds and links; its devices keep names and order.
    """

    profile: ModelProfile
    topology: ClusterTopology


@dataclass(frozen=True)
class Decision:
    """What the policy says after a window.

    Attributes:
        choice: how the run goes on.
        switch: whether that is another way than before.
        gain: how many times as fast as the present way the best other one is predicted; 1 where nothing was compared.
        text: the decision and its reason in one line.
        predicted_s: seconds of an update in the present way, under the facts of now; `None` where that cannot be predicted.
    """

    choice: Choice
    switch: bool
    gain: float
    text: str
    predicted_s: float | None = None


class ConcurrencyPolicy:
    """Chooses between windows.

    Args:
        problem: what is planned, with the facts at the beginning, the limits on staleness and the updates of a window.
        schedules: names of the orders that may be chosen; none for all that the planner knows and the limits allow.
        divisions: other ways to divide the rows of an update into microbatches: pairs (microbatches, rows of each).
        least_gain: how many times as fast another way must be predicted.
        horizon_updates: in how many updates a switch must pay.
        check: raises an `InputError` for an order, a placement and rows of a microbatch that cannot be run.

    Attributes:
        choice: how the run goes on; known once it was chosen, or adopted.
        switch_s: seconds that the last switch took; `None` before the first.
    """

    choice: Choice

    def __init__(
        self,
        problem: Problem,
        *,
        schedules: Sequence[str] = (),
        divisions: Sequence[tuple[int, int]] = (),
        least_gain: float = 1.05,
        horizon_updates: int = 200,
        check: PlanCheck | None = None,
    ) -> None:
        self.problem = problem
        self.schedules = tuple(schedules) or (AUTO,)
        self.divisions = tuple(dict.fromkeys([(problem.num_microbatches, problem.microbatch_size), *divisions]))
        self.least_gain = least_gain
        self.horizon_updates = horizon_updates
        self._problems = {division: self._of(division, Facts(problem.profile, problem.topology)) for division in self.divisions}
        """With the facts of now, by division."""
        self._chosen_with = problem
        self._searched_with: tuple[Problem, float] | None = None
        self._pending = False
        self.switch_s: float | None = None
        # Orders and lowered programs, which do not depend on the facts.
        self._schedules = {division: ScheduleCache(check) for division in self.divisions}
        self._errors: dict[Choice, deque[float]] = {}

    # The beginning

    def choose(self) -> Choice:
        """Chooses how to begin.

        Raises:
            PlanError: nothing fits; says what is wrong.
        """
        choice, _ = self._best(_FIRST_EFFORT)
        self.adopt(choice)
        self._searched_with = (self._now, 1.0)
        return choice

    def keep_scope(self, scope: UpdateScope) -> None:
        """Lets updates of all ways wait for the same from now on, so that clipping by a norm means the same."""
        self.problem = replace(self.problem, update_scope=scope)
        self._problems = {division: replace(problem, update_scope=scope) for division, problem in self._problems.items()}
        for schedules in self._schedules.values():
            schedules.clear()

    def adopt(self, choice: Choice, *, took_s: float | None = None) -> None:
        """Goes on in a given way.

        Args:
            choice: the way.
            took_s: seconds that the switch to it took.
        """
        self.choice = choice
        self._chosen_with = self._now
        self._pending = False
        if took_s is not None:
            self.switch_s = took_s

    def leave_out(self, devices: Sequence[str]) -> None:
        """Plans without some devices from now on, of which the present way needs none, and looks for a way again after the next window.

        Args:
            devices: names.
        """
        names = self.problem.names
        kept = [number for number, name in enumerate(names) if name not in devices]
        number_of = {old: new for new, old in enumerate(kept)}

        def left(problem: Problem) -> Problem:
            return replace(problem, topology=problem.topology.only([names[number] for number in kept]))

        def renumbered(choice: Choice) -> Choice:
            workers = tuple(tuple(number_of[device] for device in group) for group in choice.layout.workers)
            return replace(choice, layout=replace(choice.layout, workers=workers))

        self.problem, self._chosen_with = left(self.problem), left(self._chosen_with)
        self._problems = {division: left(problem) for division, problem in self._problems.items()}
        self.choice = renumbered(self.choice)
        ran = {choice: errors for choice, errors in self._errors.items() if {*itertools.chain(*choice.layout.workers)} <= number_of.keys()}
        self._errors = {renumbered(choice): errors for choice, errors in ran.items()}
        self._pending, self._searched_with = False, None

    # Between windows

    def after_window(self, facts: Facts, *, update_s: float, updates_left: int) -> Decision:
        """Decides how to go on.

        Args:
            facts: of now.
            update_s: seconds of an update in the last window.
            updates_left: of the run.
        """
        before = self._now
        self._problems = {division: self._of(division, facts) for division in self.divisions}
        now = self._predicted(self.choice)
        if now is None:
            return self._replaced()
        # A window in which the facts changed was partly one of the facts before, and tells nothing of the predictions.
        if not self._errors.get(self.choice) or not any(_beyond(change) for change, _ in self._changes(before)):
            errors = self._errors.setdefault(self.choice, deque(maxlen=_WINDOWS))
            errors.append(min(max(update_s / now.update_s, 1 / _MOST_WRONG), _MOST_WRONG))
        return replace(self._decided(now, updates_left), predicted_s=now.update_s)

    def _replaced(self) -> Decision:
        """Decides where the present way does not fit any more."""
        try:
            choice, _ = self._best(self._effort)
        except PlanError as error:
            return self._stay(f"the present way does not fit any more, and no other does: {error}")
        what = f"{self._difference(self.choice, choice)}: the present way does not fit into memory any more"
        return Decision(choice, switch=True, gain=1.0, text=what)

    def _decided(self, now: Evaluation, updates_left: int) -> Decision:
        """Decides where the present way can go on."""
        error = self._error(self.choice)
        if not self._pending and not self._changed(error):
            return self._stay("nothing has changed")
        self._searched_with = (self._now, error)
        try:
            return self._compare(now, *self._best(self._effort), updates_left)
        except PlanError as error:
            return self._stay(f"no other way: {error}")

    def _compare(self, now: Evaluation, choice: Choice, best: Evaluation, updates_left: int) -> Decision:
        """Decides between the present way and the best of all."""
        now_s, best_s = now.update_s * self._error(self.choice), best.update_s * self._error(choice)
        gain = now_s / best_s
        if choice == self.choice or gain <= self.least_gain:
            return self._stay(f"the best other way is predicted {gain:.2f}x as fast, {self.least_gain:.2f}x is asked for", gain)
        num_updates = min(self.horizon_updates, updates_left)
        saved_s = (now_s - best_s) * num_updates
        switch_s = self.switch_s if self.switch_s is not None else _SWITCH_S + self.moved_s(choice)
        what = f"{self._difference(self.choice, choice)}: {self._cause()}; predicted {gain:.2f}x"
        if saved_s <= switch_s:
            pays = f"the {saved_s:.1f} s that it saves in {num_updates} updates do not pay for the {switch_s:.1f} s of a switch"
            return self._stay(f"{what}, but {pays}", gain)
        if gain < _SURE_GAIN and not self._pending:
            self._pending = True
            return Decision(self.choice, switch=False, gain=gain, text=f"stays for one more window: {what}")
        return Decision(choice, switch=True, gain=gain, text=what)

    def _stay(self, reason: str, gain: float = 1.0) -> Decision:
        self._pending = False
        return Decision(self.choice, switch=False, gain=gain, text=f"stays: {reason}")

    def _changed(self, error: float) -> bool:
        """Whether facts or the error of the predictions are others than when a way was last searched for."""
        if self._searched_with is None:
            return True
        before, error_before = self._searched_with
        return _beyond(error / error_before) or any(_beyond(change) for change, _ in self._changes(before))

    def _changes(self, old: Problem) -> Iterator[tuple[float, str]]:
        """By what factor each link and device has changed, and what to say of it."""
        new = self._now
        for (sources, targets), path in zip(new.blocks, _bandwidths(new), strict=True):
            was = float(old.bandwidth[sources[0], targets[-1]])
            if sources != targets:
                ends = " -> ".join(new.topology.node_of(new.names[group[0]]).name for group in (sources, targets))
                now = f"{path * 8 / 1e6:.4g} Mbit/s" if math.isfinite(path) else "no limit"
                change = min(path, _NO_LIMIT_BYTES_PER_S) / min(was, _NO_LIMIT_BYTES_PER_S)
                yield change, f"link {ends} {'fell' if path < was else 'rose'} to {now}"
        for name in new.names:
            change = new.topology.device(name).speed / old.topology.device(name).speed
            yield change, f"device {name} computes {change:.2f}x as fast as before"
        whole = [float(problem.prefix_s[:, :, -1].sum()) for problem in (old, new)]
        yield whole[0] / whole[1], f"layers take {whole[1] / whole[0]:.2f}x as long as profiled"

    def _cause(self) -> str:
        """What has changed most since the present way was chosen."""
        changes = sorted(self._changes(self._chosen_with), key=lambda change: abs(math.log(change[0])))
        # What a link without stated limit can do is news, too, but says least of why now.
        known = [each for each in changes if not _unstated(each[0])]
        change, text = known[-1] if known and _beyond(known[-1][0]) else changes[-1]
        return text if _beyond(change) else "as measured"

    # Ways to run

    @property
    def _now(self) -> Problem:
        """What is planned, with the facts of now."""
        return self._problems[self.divisions[0]]

    def _of(self, division: tuple[int, int], facts: Facts) -> Problem:
        return replace(
            self.problem,
            profile=facts.profile,
            topology=facts.topology,
            num_microbatches=division[0],
            microbatch_size=division[1],
        )

    @property
    def _effort(self) -> float:
        """How hard to search between windows, while all devices wait: where there are many of them each look takes longer."""
        return _EFFORT * min(1.0, _FEW_DEVICES / self.problem.num_devices)

    def evaluator(self, division: tuple[int, int]) -> LayoutEvaluator:
        """What judges layouts of so many microbatches of so many rows under the facts of now."""
        return LayoutEvaluator(self._problems[division], self._schedules[division].without_refusals())

    def evaluator_of(self, choice: Choice) -> LayoutEvaluator:
        """The same for a way, whose devices have the rows that they have, whatever is known of their speeds now."""
        rows = dict(zip(choice.layout.workers, choice.rows, strict=True))
        return replace(self.evaluator(choice.division), problem=self._problems[choice.division].with_rows(rows))

    def choice_of(self, division: tuple[int, int], layout: Layout) -> Choice:
        """A layout as a way to run, with the rows that its devices would have now."""
        rows = [self._problems[division].rows(group) for group in layout.workers]
        return Choice(*division, layout, tuple(of_group for of_group in rows if of_group is not None))

    def _predicted(self, choice: Choice) -> Evaluation | None:
        found = self.evaluator_of(choice).simulate(choice.layout)
        return None if found is None or found.missing_bytes else found

    def _error(self, choice: Choice) -> float:
        """Measured over predicted seconds: of a way that ran its own, of another the present one's."""
        if not self._errors:  # nothing has run yet
            return 1.0
        return statistics.median(self._errors.get(choice) or self._errors.get(self.choice) or (1.0,))

    def _best(self, effort: float) -> tuple[Choice, Evaluation]:
        """The way that is fastest under the facts of now, all corrected by what was measured."""
        failures: list[str] = []
        found: list[tuple[float, int, Choice, Evaluation]] = []
        budget = Budget.usual(self.problem.num_devices, effort=effort)
        for division in self.divisions:
            for schedule in self.schedules:
                try:
                    evaluation = solve(self.evaluator(division), schedule=schedule, budget=budget)
                except InputError as error:
                    if division == self.divisions[0]:  # the one that was asked for
                        failures.append(str(error))
                    continue
                choice = self.choice_of(division, evaluation.layout)
                found.append((evaluation.update_s * self._error(choice), len(found), choice, evaluation))
        for choice in self._errors:  # what ran can run again, and so can what is much like it
            if (known := self._predicted(choice)) is not None:
                found.append((known.update_s * self._error(choice), len(found), choice, known))
                near = climbed(self.evaluator(choice.division), known, most_steps=_STEPS, neighbours=_neighbours)
                if near is not None and near is not known and not near.missing_bytes:
                    way = self.choice_of(choice.division, near.layout)
                    found.append((near.update_s * self._error(way), len(found), way, near))
        if not found:
            raise PlanError("no way to run was found: " + "; ".join(failures))
        _, _, choice, evaluation = min(found)
        return choice, evaluation

    def moved_s(self, choice: Choice) -> float:
        """Seconds in which the layers that change their device get there, one after the other over the slowest link."""
        problem = self._now
        held = [self._held(way) for way in (self.choice, choice)]
        moved = {(device, layer) for device, layer in held[1] if (device, layer) not in held[0]}
        num_bytes = sum(problem.profile.layers[layer].parameter_bytes for _, layer in moved) * STATE_BYTES_PER_PARAMETER_BYTE
        slowest = float(np.min(problem.bandwidth))
        return num_bytes / slowest if math.isfinite(slowest) else 0.0

    def _difference(self, one: Choice, other: Choice) -> str:
        """What a switch changes, in words."""
        parts: list[str] = []
        if one.layout.order != other.layout.order:
            parts.append(f"{one.layout.order} -> {other.layout.order}")
        counts = [self.num_pipelines(choice) for choice in (one, other)]
        if counts[0] != counts[1]:
            parts.append(f"{counts[0]} -> {counts[1]} pipelines")
        if one.num_microbatches != other.num_microbatches:
            parts.append(f"{one.num_microbatches} -> {other.num_microbatches} microbatches")
        if one.layout.workers != other.layout.workers:
            names = self.problem.names
            parts.append(f"stages on {', '.join('+'.join(names[device] for device in group) for group in other.layout.workers)}")
        if one.rows != other.rows and one.layout.workers == other.layout.workers:
            parts.append("other rows for the devices of a stage")
        if not parts:
            parts.append("other cuts" if one.layout.cuts != other.layout.cuts else "another limit on activations or recomputation")
        return ", ".join(parts)

    def num_pipelines(self, choice: Choice) -> int:
        """The layings of the model that a way has."""
        return len(self._pipelines(choice))

    def _pipelines(self, choice: Choice) -> tuple[tuple[int, ...], ...]:
        problem = self.evaluator_of(choice).problem
        return layout_schedule(problem, choice.layout, num_updates=window_updates(problem, choice.layout)).pipelines

    def _held(self, choice: Choice) -> set[tuple[int, int]]:
        """Pairs of a device and a layer that it holds."""
        layout = choice.layout
        return {
            (device, layer)
            for laying in self._pipelines(choice)
            for stage, worker in enumerate(laying)
            for device in layout.workers[worker]
            for layer in range(layout.cuts[stage], layout.cuts[stage + 1])
        }


def _unstated(change: float) -> bool:
    """Whether a bandwidth has changed from no limit, or to none."""
    return abs(math.log(change)) > _UNSTATED


def _neighbours(layout: Layout) -> Iterator[Layout]:
    """The layout with a layer moved between two stages, or with two workers that have changed their places."""
    yield from chunks.neighbours(layout)
    for one, other in islice(combinations(range(len(layout.workers)), 2), _MOST_SWAPS):
        workers = list(layout.workers)
        workers[one], workers[other] = workers[other], workers[one]
        yield replace(layout, workers=tuple(workers))


def _beyond(change: float) -> bool:
    return not 1 / _CHANGED <= change <= _CHANGED


def _bandwidths(problem: Problem) -> Floats:
    """Bytes per second of each block of pairs of devices."""
    return np.array([problem.bandwidth[sources[0], targets[-1]] for sources, targets in problem.blocks])
