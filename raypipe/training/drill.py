"""Drills: how a run recovers from faults that strike its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer

_WINDOWS_BEFORE = 2
_WINDOWS_BEHIND = 2


@dataclass(frozen=True)
class Drill:
    """A run without faults, and one with them."""

    calm: Result
    struck: Result

    @property
    def largest_difference(self) -> float:
        """The largest difference between the losses of an update."""
        return max(abs(ours - theirs) for ours, theirs in zip(self.calm.losses, self.struck.losses, strict=True))


def drill(config: TrainConfig, faults: Mapping[FaultKind, Sequence[int]]) -> Drill:
    """Train for some windows without faults and with them; `faults` are the stages that each kind strikes, a window each.

    The runs are called as that of the configuration, and `-drill`.

    Raises:
        ConfigError: There is no such stage.
        RunError: A run did not recover.
    """
    struck = [(kind, stage) for kind, stages in faults.items() for stage in stages]
    num_updates = config.schedule.updates_per_window * (_WINDOWS_BEFORE + len(struck) + _WINDOWS_BEHIND)
    short = replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-drill", num_updates=num_updates, checkpoint_every_s=0.0, sample_bytes=0),
        data=replace(config.data, num_validation_microbatches=0),
        failure=replace(config.failure, max_failures=max(config.failure.max_failures, 1)),
    )
    calm = Trainer.of(short).fit()
    script = FaultScript()
    for number, (kind, stage) in enumerate(struck):
        if not 0 <= stage < calm.plan.schedule.num_stages:
            raise ConfigError(f"the run has the stages 0 to {calm.plan.schedule.num_stages - 1}, not {stage}; choose one of them to {kind}")
        script = script.fail_stage(stage, kind=kind, window=_WINDOWS_BEFORE + number)
    return Drill(calm, Trainer.of(short, faults=script).fit())
