"""What `raypipe plan --explain` says of a plan: what binds, why devices idle, what would help, and which plans lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.console import Console

from raypipe.analysis.changes import Effect, effects
from raypipe.analysis.idle import divide
from raypipe.analysis.rivals import Kind, Rivals, lost_in, parts_s
from raypipe.artifacts.plan import Plan
from raypipe.planning.evaluator import Evaluation
from raypipe.planning.limits import without_limits
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import division_of_stages
from raypipe.show.causes import findings
from raypipe.show.report import Figure, Report, rows_table
from raypipe.show.tables import prediction
from raypipe.show.traces import idle_report
from raypipe.simulation.plan_cost import stage_buckets
from raypipe.simulation.simulator import simulate
from raypipe.units import ratio, seconds, size

_LEAST_SAVED = 0.01
"""A change that saves a smaller part of an update is not worth a word."""
_LIMITS = {
    "devices": "the speed of devices",
    "links": "links",
    "memory": "memory",
    "ramp": "the ramp: filling and draining the pipeline, which smaller microbatches shorten",
    "staleness": "waiting for each update",
}


class Explanation:
    """Why a plan is as it is. Plans again for each change and limit; `again` plans with the options of the plan."""

    def __init__(self, plan: Plan, rivals: Rivals, again: Callable[..., Plan]) -> None:
        self.plan = plan
        self.trace = simulate(plan)
        self.effects = effects(plan, lambda topology, **options: again(plan.profile, topology, **options))
        self.without = [Report(*self._without(limit.limit, limit.update_s)) for limit in without_limits(plan, again)]
        self.rivals = [self._rival(kind, evaluation) for kind, evaluation in rivals.by_rank()]

    @property
    def update_s(self) -> float:
        """Seconds of an update of the plan."""
        return prediction(self.plan).update_s

    def report(self) -> Report:
        """Return the JSON document."""
        best = self._best
        return Report(
            Figure("binds", best.change.limit if best else None),
            Figure("binding", self.sentence()),
            Figure("helps", list(map(self._effect, self.effects))),
            Figure("idle", idle_report(divide(self.trace))),
            Figure("tried", self.rivals),
            Figure("without", self.without),
            Figure("schedule_parameters", parameters(self.plan)),
        )

    def show(self, screen: Console) -> None:
        """Print all of it."""
        screen.print(f"\n{self.sentence()}", style="bold")
        useful = [effect for effect in self.effects if self._saved(effect) >= _LEAST_SAVED]
        if useful:
            screen.print()
            screen.print(rows_table(list(map(self._effect, useful))))
        division = divide(self.trace)
        screen.print("\nwhere the time of each device goes", style="bold")
        screen.print(idle_report(division).table())
        for sentence in findings(division):
            screen.print(f"\n{sentence}")
        screen.print("\nthe best plans of each kind", style="bold")
        screen.print(rows_table(self.rivals, left=2))
        if self.without:
            screen.print()
            screen.print(rows_table(self.without))
        screen.print(f"\n{parameters(self.plan).sentence()}")

    def sentence(self) -> str:
        """Say what binds: what the change that saves most relieves."""
        best = self._best
        if best is None:
            return "nothing binds alone: no single change to devices, links, memory or microbatches saves a hundredth of an update"
        return f"what binds is {_LIMITS[best.change.limit]}: with {best.change.what} an update takes at most {seconds(best.update_s)}"

    @property
    def _best(self) -> Effect | None:
        best = next(iter(self.effects), None)
        return best if best is not None and self._saved(best) >= _LEAST_SAVED else None

    def _saved(self, effect: Effect) -> float:
        return 1 - effect.update_s / self.update_s if self.update_s else 0.0

    def _effect(self, effect: Effect) -> Report:
        return Report(
            Figure("limit", effect.change.limit),
            Figure("change", effect.change.what, "with"),
            Figure("update_s", effect.update_s, "an update takes at most", seconds),
            Figure("saved_s", self.update_s - effect.update_s, "and saves", seconds),
            Figure("", self._saved(effect), "of it", ratio),
        )

    def _without(self, limit: str, update_s: float) -> list[Figure]:
        return [
            Figure("limit", limit, "without"),
            Figure("update_s", update_s, "update", seconds),
            Figure("cost_s", self.update_s - update_s, "so it costs", seconds),
        ]

    def _rival(self, kind: Kind, evaluation: Evaluation) -> Report:
        part, more_s = lost_in(
            parts_s(evaluation.timing.trace(name=self.plan.name, with_memory=False), evaluation.update_s),
            parts_s(self.trace, self.update_s),
        )
        is_chosen = evaluation.update_s <= self.update_s and not evaluation.missing_bytes
        lost = None if is_chosen else "memory" if evaluation.missing_bytes else part
        return Report(
            Figure("schedule", kind.schedule, "schedule"),
            Figure("form", kind.form, "form"),
            Figure("num_stages", evaluation.layout.num_stages, "stages"),
            Figure("num_devices", sum(map(len, evaluation.layout.workers)), "devices"),
            Figure("update_s", evaluation.update_s, "best update", seconds),
            Figure("", evaluation.update_s / self.update_s if self.update_s else None, "over this plan's", "{:.3f}".format),
            Figure("lost_in", lost, "lost in"),
            Figure("lost_s", None if is_chosen or evaluation.missing_bytes else more_s, "by", seconds),
            Figure("missing_bytes", round(evaluation.missing_bytes), "lacks", lambda missing: size(missing) if missing else "-"),
        )


def parameters(plan: Plan) -> Report:
    """Return every parameter of a plan's order."""
    schedule, found = plan.schedule, metrics(plan.schedule)
    per_worker = partial(map, str)
    stages = [sum(pipeline.count(worker) for pipeline in schedule.pipelines) for worker in range(schedule.num_workers)]
    return Report(
        Figure("num_pipelines", len(schedule.pipelines), "pipelines"),
        Figure("stages_per_worker", max(stages), "stages a worker"),
        Figure("updates_per_window", schedule.num_updates, "updates a window"),
        Figure("weight_rule", str(schedule.weight_rule), "weights by rule"),
        Figure("update_scope", str(schedule.update_scope), "updates wait for gradients of scope"),
        Figure("late_weight_grads", division_of_stages(schedule)[1], "microbatches whose weight gradients stand last"),
        Figure("max_in_flight", " ".join(per_worker(found.peak_in_flight)), "microbatches in flight"),
        Figure("weight_copies", " ".join(per_worker(found.weight_copies)), "copies of weights"),
        Figure("max_staleness", found.max_delay, "staleness up to"),
        Figure("mean_staleness", found.mean_delay, "in the mean", "{:.3g}".format),
        Figure("max_mismatch", found.max_mismatch, "mismatch up to"),
        Figure("sum_buckets", " ".join(per_worker(stage_buckets(plan.profile, plan.cut))), "buckets of each stage's sum"),
    )
