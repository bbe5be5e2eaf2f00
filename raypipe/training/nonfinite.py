"""Updates that have no finite loss or gradient, or no rows that count: noticed behind their window, left out when it is done again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from raypipe.actors.execution.report import mean_losses, norms_of
from raypipe.cluster.window import WindowResult
from raypipe.config import OnNonFinite
from raypipe.errors import NonFiniteError
from raypipe.schedules.ir import Schedule
from raypipe.units import counted

_MOST_IN_A_ROW = 3
_MOST_NAMED = 3


class NonFiniteUpdates:
    """The updates of a run that change no weight.

    All stages leave out the same ones, under every schedule: which they are is decided behind a window, which then runs again.
    """

    def __init__(self, policy: OnNonFinite, *, can_repeat: bool, notice: Callable[[str], None]) -> None:
        self._policy, self._can_repeat, self._notice = policy, can_repeat, notice
        self._skipped: set[int] = set()
        self._is_told = False

    def skipped(self, first_update: int, num_updates: int) -> frozenset[int]:
        """Return the left out updates of a window, by their numbers in it."""
        return frozenset(update - first_update for update in self._skipped if 0 <= update - first_update < num_updates)

    def must_repeat(
        self, result: WindowResult, schedule: Schedule, *, first_update: int, layers: Callable[[], Sequence[tuple[int, str]]]
    ) -> bool:
        """Return whether a window must run again without the first update that went bad.

        `layers` returns stage and name of each layer whose weights are not finite any more.

        Raises:
            NonFiniteError: The run is to stop.
        """
        skipped = self.skipped(first_update, result.num_updates)
        empty = without_rows(result, schedule) - skipped
        if empty and self._leave_out_empty({first_update + number for number in empty}):
            return True
        found = first_bad(result, schedule, without=skipped, empty=empty)
        if found is None:
            return False
        number, problem = found
        update = first_update + number
        what = f"update {update + 1}: {problem}{_layers_text(layers())}"
        if self._policy is OnNonFinite.CONTINUE:
            if not self._is_told:
                self._notice(f"{what}; run.on_nonfinite is continue, so that the run goes on with it")
            self._is_told = True
            return False
        if not self._can_repeat:
            raise NonFiniteError(f"{what}; it can only be skipped where failure.max_failures lets the run keep copies of its state")
        self._skipped.add(update)
        if self._policy is OnNonFinite.STOP and all(before in self._skipped for before in range(update - _MOST_IN_A_ROW + 1, update + 1)):
            raise NonFiniteError(
                f"{what}; so were the {_MOST_IN_A_ROW - 1} updates before. Checkpoints from before stay: resume with a lower "
                "optimizer.learning_rate or other data, or set run.on_nonfinite to skip"
            )
        self._notice(f"{what}; the window runs again without this update")
        return True

    def _leave_out_empty(self, updates: set[int]) -> bool:
        """Return whether a window must run again without updates that have nothing to learn from, which is no failure."""
        others = f" and {counted(len(updates) - 1, 'other')}" if len(updates) > 1 else ""
        first = f"update {min(updates) + 1}{others}"
        why = "none of its rows counts: their `Model.loss_weight` is 0"
        if self._policy is OnNonFinite.CONTINUE or not self._can_repeat:
            remedy = "failure.max_failures would let it be left out" if not self._can_repeat else "run.on_nonfinite is continue"
            self._notice(f"{first}: {why}; the optimizer steps all the same ({remedy})")
            return False
        self._skipped |= updates
        self._notice(f"{first}: {why}; the window runs again without it")
        return True


def without_rows(result: WindowResult, schedule: Schedule) -> frozenset[int]:
    """Return the updates of a window none of whose rows counts."""
    counts: dict[int, float] = {}
    for report in result.reports:
        for index, weight in report.loss_weights.items():
            update = index // schedule.num_microbatches
            counts[update] = counts.get(update, 0.0) + weight
    return frozenset(update for update, weight in counts.items() if not weight)


def first_bad(
    result: WindowResult, schedule: Schedule, *, without: frozenset[int], empty: frozenset[int] = frozenset()
) -> tuple[int, str] | None:
    """Return the first update of a window whose loss or gradient norm is not finite, and what is wrong with it.

    `empty` updates have no loss, but may have a gradient: a loss that divides by its number of targets makes it no number.
    """
    count = schedule.num_microbatches
    losses = mean_losses(result.reports, num_microbatches=count)
    norms = norms_of(result.reports, scope=schedule.update_scope)
    for update, loss in enumerate(losses):
        if update in without:
            continue
        if not math.isfinite(loss) and update not in empty:
            of_update = ((index, one) for report in result.reports for index, one in report.losses.items() if index // count == update)
            bad = [index % count for index, one in of_update if not math.isfinite(one)]
            return update, f"the loss of microbatch {min(bad, default=0)} is {loss}"
        if not math.isfinite(norms.get(update, 0.0)):
            return update, f"the norm of the gradient is {norms[update]}"
    return None


def _layers_text(layers: Sequence[tuple[int, str]]) -> str:
    if not layers:
        return ""
    named = ", ".join(f"{name} (stage {stage})" for stage, name in layers[:_MOST_NAMED])
    more = f" and {counted(len(layers) - _MOST_NAMED, 'more')}" if len(layers) > _MOST_NAMED else ""
    return f"; afterwards weights are not finite in {named}{more}"
