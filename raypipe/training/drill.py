"""Drills: how a run recovers from faults that strike its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from raypipe.actors.execution.faults import CONNECT, SAVE, FaultKind, FaultScript
from raypipe.actors.execution.programs import executable_programs
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, suggestion
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import Placement
from raypipe.training.result import Result
from raypipe.training.run_strategy import run_strategy
from raypipe.training.trainer import Trainer
from raypipe.training.window_sizes import window_sizes
from raypipe.user_code import make_model

_WINDOWS_BEFORE = 2
_WINDOWS_BEHIND = 2


@dataclass(frozen=True)
class DrillFault:
    """A fault of a drill, on a stage or on a device by number; attributes as of `raypipe.actors.execution.faults.Fault`."""

    kind: FaultKind
    stage: int | None = None
    device: int | None = None
    before: str | None = None
    hang_s: float = 3600.0

    @classmethod
    def parse(cls, kind: FaultKind, text: str) -> DrillFault:
        """Return a fault from text such as `2`, `stage=2`, `device=1,before=save` or `stage=0,for=5,before=0B1`.

        `before` comes last. A device needs one.

        Raises:
            ConfigError: The text says something else.
        """
        places, _, before = text.partition("before=")
        fields = dict(field.partition("=")[::2] for field in places.strip(", ").split(",") if field)
        if list(fields.values()) == [""]:
            fields = {"stage": next(iter(fields))}
        try:
            stage, device = (int(fields.pop(name)) if name in fields else None for name in ("stage", "device"))
            hang_s = float(fields.pop("for", 3600.0))
        except ValueError as error:
            raise ConfigError(f"{text!r}: {error}; {_PLACES}") from None
        if fields or (stage is None) == (device is None) or (device is not None and not before):
            raise ConfigError(f"{text!r} is no place for a fault; {_PLACES}")
        return cls(kind, stage, device, before or None, hang_s)

    @property
    def place(self) -> str:
        """Return where it strikes, in words."""
        return f"stage {self.stage}" if self.stage is not None else f"device {self.device}"


_PLACES = "write stage=N, or device=N,before=WHAT; before=WHAT may follow stage=N, and for=SECONDS how long it hangs"


@dataclass(frozen=True)
class Drill:
    """A run without faults, and one with them."""

    calm: Result
    struck: Result

    @property
    def largest_difference(self) -> float:
        """The largest difference between the losses of an update."""
        return max(abs(ours - theirs) for ours, theirs in zip(self.calm.losses, self.struck.losses, strict=True))


def drill(config: TrainConfig, faults: Sequence[DrillFault]) -> Drill:
    """Train for some windows without faults and with them, each in a window of its own.

    A fault before `CONNECT` strikes while the run recovers from an error of stage 0. If there is one before `SAVE`, both runs save behind
    every window. The runs are called as that of the configuration, and `-drill`.

    Raises:
        ConfigError: There is no such stage or device, or it never does what a fault is to strike before.
        RunError: A run did not recover.
    """
    # Those before CONNECT come first: then it is known how often the devices have met by then.
    ordered = sorted(faults, key=lambda fault: fault.before != CONNECT)
    num_windows = _WINDOWS_BEFORE + len(ordered) + sum(fault.before == SAVE for fault in ordered) + _WINDOWS_BEHIND
    per_window = config.schedule.updates_per_window
    run = replace(
        config.run,
        name=f"{config.run.name}-drill",
        num_updates=per_window * num_windows,
        checkpoint_every_s=0.0,
        checkpoint_every=per_window if any(fault.before == SAVE for fault in ordered) else 0,
        keep_best_by=None,
        sample_bytes=0,
    )
    short = replace(
        config,
        run=run,
        data=replace(config.data, num_validation_microbatches=0),
        failure=replace(config.failure, max_failures=max(config.failure.max_failures, 1)),
    )
    trainer = Trainer.of(short)
    _check_early(ordered, trainer)
    calm = trainer.fit()
    for fault in ordered:
        _check_place(fault, calm.plan.schedule, calm.plan.placement)
        _check_before(fault, calm.plan.schedule, calm.plan.placement)
    return Drill(calm, Trainer.of(short, faults=_script(ordered)).fit())


def _script(faults: Sequence[DrillFault]) -> FaultScript:
    script, window, num_met = FaultScript(), _WINDOWS_BEFORE, 1
    for fault in faults:
        at = window
        if fault.before == CONNECT:
            script = script.fail_at(stage=0, kind=FaultKind.RAISE, window=window)
            at, num_met = num_met, num_met + 2  # they meet in vain, and once more
        script = script.fail_at(
            stage=fault.stage, device=fault.device, before=fault.before, kind=fault.kind, window=at, hang_s=fault.hang_s
        )
        window += 1 + (fault.before == SAVE)  # what strikes while a window is saved is felt in the next one
    return script


def _check_early(faults: Sequence[DrillFault], trainer: Trainer) -> None:
    """Check what is known before the first run."""
    config = trainer.config
    model = make_model(trainer.model_function, config.model.options)
    strategy = run_strategy(config, model, trainer.plan, window_sizes=window_sizes(config, 0))
    if not strategy.schedules:  # raypipe chooses one when the run begins
        return
    # Else where layers are cut, which their times decide, says which messages there are.
    is_known = trainer.plan is not None or (not model.ties and model.edges() == tuple(pairwise(range(len(model.layers)))))
    for fault in faults:
        _check_place(fault, strategy.schedule, strategy.placement)
        if is_known:
            _check_before(fault, strategy.schedule, strategy.placement)


def _check_place(fault: DrillFault, schedule: Schedule, placement: Placement) -> None:
    num_devices = sum(len(members) for members in placement.workers)
    for what, number, count in (("stage", fault.stage, schedule.num_stages), ("device", fault.device, num_devices)):
        if number is not None and not 0 <= number < count:
            raise ConfigError(f"the run has the {what}s 0 to {count - 1}, not {number}; choose one of them to {fault.kind}")
    if fault.before == CONNECT and fault.kind is FaultKind.HANG:
        raise ConfigError(f"a device that hangs before {CONNECT} may be awaited; choose another fault there")


def _check_before(fault: DrillFault, schedule: Schedule, placement: Placement) -> None:
    if fault.before in {None, SAVE, CONNECT}:
        return
    texts: set[str] = set()
    for number, program in enumerate(executable_programs(schedule, placement)):
        if fault.device == number or fault.stage in program.primary_stages:
            for item in program.items:
                texts.add(str(getattr(item, "message", getattr(item, "collective", item))))
    # A sum may be done in parts, which have more in their names.
    if not any(str(fault.before).startswith(text) for text in texts):
        near = suggestion(str(fault.before), texts) or f"; it does, for example, {', '.join(sorted(texts)[:3])}"
        raise ConfigError(f"{fault.place} never does {fault.before!r}{near}")
