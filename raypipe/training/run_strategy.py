"""Which strategy a configuration asks for."""

from __future__ import annotations

from raypipe.artifacts.plan import Plan
from raypipe.config import AUTO, TrainConfig
from raypipe.model import Model
from raypipe.schedules.families import branch_aware
from raypipe.training.adaptive import AdaptiveStrategy
from raypipe.training.checks import check_staleness
from raypipe.training.strategy import NamedStrategy, PlannedStrategy, Strategy


def run_strategy(config: TrainConfig, model: Model, plan: Plan | None, *, window_sizes: set[int], has_batches: bool = False) -> Strategy:
    """Return how a run divides its work, by its configuration; whoever gives it batches decides how many rows they have."""
    start: Strategy | None = None
    if plan is not None:
        start = PlannedStrategy(plan, config, model, window_sizes=window_sizes)
    elif config.schedule.name not in {AUTO, branch_aware.NAME}:
        start = NamedStrategy(config, model, window_sizes=window_sizes)
    if start is not None:
        check_staleness(config, start.schedule)
        if not config.adaptation.enabled:
            return start
    # A schedule asked for by name keeps the microbatches asked for with it.
    is_open = config.adaptation.enabled or config.schedule.name == AUTO
    can_divide = is_open and not has_batches and config.adaptation.divisions and not model.loss_couples_rows
    return AdaptiveStrategy(config, model, window_sizes=window_sizes, start=start, can_divide=can_divide)
