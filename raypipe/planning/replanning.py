"""Decisions between windows: whether a run switches to other pipelines, schedule, cut, division of its rows or devices.

change    nothing is searched again before a figure or the error of the predictions changes by a seventh
gain      another choice must be predicted faster by more than `least_gain`, after correction by measured errors
twice     unless the gain is large, two consecutive windows must say so
horizon   the time saved within the horizon must exceed the cost of the switch
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypipe.errors import PlanError
from raypipe.planning.choices import Choice, ChoicePlanner, only
from raypipe.planning.cluster_state import ClusterState, have_changed, is_significant, largest_change
from raypipe.planning.evaluator import Evaluation
from raypipe.planning.layout_schedules import PlanCheck
from raypipe.planning.problem import Problem
from raypipe.schedules.ir import UpdateScope

_SURE_GAIN = 1.25  # Gain for which one window is enough.
_WINDOWS = 3  # Number of last windows whose median is the error of the predictions.
_MOST_WRONG = 4.0
_FIRST_EFFORT = 0.3
_EFFORT = 0.2  # Effort of the first search and of those between windows; `raypipe plan` takes 1.
_FEW_DEVICES = 4
_SWITCH_S = 3.0  # Seconds that the first switch is assumed to cost, besides moving bytes.


@dataclass(frozen=True)
class Decision:
    """Decision of the policy after a window.

    Attributes:
        gain: Speed of the best other choice over that of the current one; 1 where nothing was compared.
        predicted_s: Seconds of an update of the current choice; `None` where it cannot be predicted.
    """

    choice: Choice
    switch: bool
    gain: float
    text: str
    predicted_s: float | None = None


class ConcurrencyPolicy:
    """Decides between windows how a run continues.

    No `schedules` stands for all that the staleness limits allow; `divisions` are pairs (microbatches of an update, rows of each).

    Attributes:
        choice: Current choice; set by `choose` or `adopt`.
        switch_s: Seconds that the last switch took; `None` before the first.
    """

    choice: Choice

    def __init__(
        self,
        problem: Problem,
        *,
        schedules: Sequence[str] = (),
        divisions: Sequence[tuple[int, int]] = (),
        least_gain: float = 1.03,
        horizon_updates: int = 200,
        check: PlanCheck | None = None,
    ) -> None:
        self.planner = ChoicePlanner(problem, schedules, divisions, check)
        self.least_gain = least_gain
        self.horizon_updates = horizon_updates
        self.switch_s: float | None = None
        self._chosen_with = problem
        self._searched_with: tuple[Problem, float] | None = None
        self._pending = False
        self._errors: dict[Choice, deque[float]] = {}

    def choose(self) -> Choice:
        """Choose how to begin.

        Raises:
            PlanError: Nothing fits.
        """
        choice, _ = self._best(_FIRST_EFFORT)
        self.adopt(choice)
        self._searched_with = (self.planner.now, 1.0)
        return choice

    def keep_scope(self, scope: UpdateScope) -> None:
        """Keep one update scope for all choices, so that clipping by a norm means the same."""
        self.planner.keep_scope(scope)

    def adopt(self, choice: Choice, *, took_s: float | None = None) -> None:
        """Continue with a choice, after a switch that took `took_s`."""
        self.choice = choice
        self._chosen_with = self.planner.now
        self._pending = False
        if took_s is not None:
            self.switch_s = took_s

    def leave_out(self, devices: Sequence[str]) -> None:
        """Plan without some idle devices, and search again after the next window."""
        names = self.planner.problem.names
        kept = [number for number, name in enumerate(names) if name not in devices]
        kept_names = [names[number] for number in kept]
        number_of = {old: new for new, old in enumerate(kept)}

        def renumbered(choice: Choice) -> Choice:
            workers = tuple(tuple(number_of[device] for device in group) for group in choice.layout.workers)
            return replace(choice, layout=replace(choice.layout, workers=workers))

        self.planner.keep_devices(kept_names)
        self._chosen_with = only(self._chosen_with, kept_names)
        self.choice = renumbered(self.choice)
        ran = {choice: errors for choice, errors in self._errors.items() if {*itertools.chain(*choice.layout.workers)} <= number_of.keys()}
        self._errors = {renumbered(choice): errors for choice, errors in ran.items()}
        self._pending, self._searched_with = False, None

    def after_window(self, state: ClusterState, *, update_s: float, updates_left: int) -> Decision:
        """Decide how to continue after a window with updates of `update_s`."""
        before = self.planner.now
        self.planner.observe(state, runs=self.choice)
        current = self.planner.predicted(self.choice)
        if current is None:
            return self._replaced()
        # A window in which the state changed ran partly in the old one, and tells nothing of the predictions.
        if not self._errors.get(self.choice) or not have_changed(before, self.planner.now):
            errors = self._errors.setdefault(self.choice, deque(maxlen=_WINDOWS))
            errors.append(min(max(update_s / current.update_s, 1 / _MOST_WRONG), _MOST_WRONG))
        return replace(self._decided(current, updates_left), predicted_s=current.update_s)

    def _replaced(self) -> Decision:
        try:
            choice, _ = self._best(self._effort)
        except PlanError as error:
            return self._stay(f"the current plan no longer fits, and no other does: {error}")
        text = f"{self.planner.difference(self.choice, choice)}: the current plan no longer fits into memory"
        return Decision(choice, switch=True, gain=1.0, text=text)

    def _decided(self, current: Evaluation, updates_left: int) -> Decision:
        error = self._error(self.choice)
        if not self._pending and self._searched_with is not None:
            before, error_before = self._searched_with
            if not is_significant(error / error_before) and not have_changed(before, self.planner.now):
                return self._stay("nothing has changed")
        self._searched_with = (self.planner.now, error)
        try:
            return self._compared(current, *self._best(self._effort), updates_left)
        except PlanError as failure:
            return self._stay(f"there is no other plan: {failure}")

    def _compared(self, current: Evaluation, choice: Choice, best: Evaluation, updates_left: int) -> Decision:
        current_s, best_s = current.loss_s * self._error(self.choice), best.loss_s * self._error(choice)
        gain = current_s / best_s
        more = best.more_updates / current.more_updates
        to_loss = "" if best.more_updates == current.more_updates == 1 else " to the same loss"
        if choice == self.choice or gain <= self.least_gain:
            return self._stay(f"the best other plan is predicted {gain:.2f}x as fast{to_loss}; a switch needs {self.least_gain:.2f}x", gain)
        num_updates = min(self.horizon_updates, updates_left)
        saved_s = (current_s - best_s) * num_updates
        switch_s = self.switch_s if self.switch_s is not None else _SWITCH_S + self.planner.moved_s(self.choice, choice)
        cause = largest_change(self._chosen_with, self.planner.now)
        text = f"{self.planner.difference(self.choice, choice)}: {cause}; predicted {gain:.2f}x{to_loss}"
        if more != 1:
            text += f": updates {gain * more:.2f}x as fast, {more:.2f}x as many"
        if saved_s <= switch_s:
            reason = f"the {saved_s:.1f} s that it saves{to_loss} in {num_updates} updates do not pay for the {switch_s:.1f} s of a switch"
            return self._stay(f"{text}, but {reason}", gain)
        if gain < _SURE_GAIN and not self._pending:
            self._pending = True
            return Decision(self.choice, switch=False, gain=gain, text=f"stays for one more window: {text}")
        return Decision(choice, switch=True, gain=gain, text=text)

    def _stay(self, reason: str, gain: float = 1.0) -> Decision:
        self._pending = False
        return Decision(self.choice, switch=False, gain=gain, text=f"stays: {reason}")

    def _best(self, effort: float) -> tuple[Choice, Evaluation]:
        return self.planner.best(effort, self._error, self._errors)

    @property
    def _effort(self) -> float:
        # All devices wait while a search runs between windows: one to three seconds on four devices, four to eight on eight.
        return _EFFORT * min(1.0, _FEW_DEVICES / self.planner.problem.num_devices)

    def _error(self, choice: Choice) -> float:
        if not self._errors:
            return 1.0
        return statistics.median(self._errors.get(choice) or self._errors.get(self.choice) or (1.0,))
