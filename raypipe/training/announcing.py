"""What a run tells of itself before it trains."""

from __future__ import annotations

from raypipe.config import TrainConfig
from raypipe.planning.staleness_cost import both_halves, drain_s, known_optimizer
from raypipe.schedules.collectives import late_rows_refusal
from raypipe.schedules.metrics import metrics
from raypipe.simulation.plan_cost import late_row_stages
from raypipe.training.checks import late_remedy
from raypipe.training.run_cluster import Notice
from raypipe.training.run_schedules import is_sharded
from raypipe.training.strategy import Strategy
from raypipe.units import counted


def announce(config: TrainConfig, strategy: Strategy, *, num_parameters: int, num_devices: int, notice: Notice) -> None:
    """Tell what is trained, how it is divided, what is predicted, and what the user may have overlooked."""
    schedule, predicted = strategy.schedule, strategy.plan.predicted
    assert predicted is not None, "a strategy predicts its plan"
    notice(
        f"{num_parameters / 1e6:.2f} M parameters on {counted(num_devices, 'device')}, schedule {schedule.name}, precision "
        f"{config.model.precision}"
    )
    size = config.schedule
    num_rows = size.num_microbatches * size.microbatch_size
    notice(f"{num_rows} rows an update: {counted(size.num_microbatches, 'microbatch')} of {size.microbatch_size}")
    notice(f"layers of each stage: {' '.join(str(len(layers)) for layers in strategy.cut.stages)}")
    notice(f"predicted {predicted.update_s:.3f} s per update, bubble {predicted.bubble_ratio:.1%}")
    mean_delay = metrics(schedule).mean_delay
    if schedule.weight_rule.overlaps_updates:
        window = strategy.predicted
        more_s = drain_s(window.makespan_s, window.steady_update_s, window.num_updates, window.num_updates)
        notice(both_halves(predicted.update_s, mean_delay, known_optimizer(config.optimizer), config.synchronous_share, more_s))
    for stage in late_row_stages(strategy.plan.profile, strategy.cut):
        if reason := late_rows_refusal(schedule, stage):
            notice(f"all rows that an update looks up on stage {stage} are due at once: {reason}")
    if config.scaling.shard_optimizer and not is_sharded(schedule):
        notice(f"scaling.shard_optimizer changes nothing: {schedule.name} has each stage on one device only")
    if mean_delay and (remedy := late_remedy(config.optimizer, mean_delay)):
        notice(
            f"gradients are {mean_delay:.2g} updates late on average: with {remedy} and a long optimizer.warmup_updates training loses "
            "less by that (docs/optimizers.md)"
        )
