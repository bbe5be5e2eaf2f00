"""Where a run has the costs of its layers from: measured on its devices, estimated, or from a file."""

from __future__ import annotations

from raypipe.actors.measure.layer_costs import ESTIMATES, USUAL_EFFORT, LayerMeasurement
from raypipe.actors.orders import BatchFunction, ModelFunction
from raypipe.actors.stage.optimizer_names import OptimizerFunction
from raypipe.artifacts.profile import ModelProfile
from raypipe.cluster.coordinator import Coordinator
from raypipe.config import ESTIMATED, MEASURED, TrainConfig
from raypipe.errors import ConfigError
from raypipe.model import Model
from raypipe.profiling.late_rows import with_rows_of
from raypipe.profiling.profiler import model_profile
from raypipe.training.run_cluster import Notice
from raypipe.units import counted, seconds
from raypipe.user_code import IN_PYTHON


def configured_profile(
    config: TrainConfig, model: Model, notice: Notice, *, optimizer_function: OptimizerFunction | None = None
) -> ModelProfile | None:
    """Return the profile in the configured file as it holds for the optimizer, `None` where layers are measured or estimated.

    Raises:
        InputError: The file cannot be read, or is that of another model or microbatch size.
    """
    path = config.scaling.profile
    if path is None or path in {MEASURED, ESTIMATED}:
        return None
    if config.plan is not None:
        raise ConfigError("scaling.profile: a plan brings its own profile; leave this out")
    profile = ModelProfile.load(path)
    ours, theirs = [layer.name for layer in model.layers], [layer.name for layer in profile.layers]
    if ours != theirs:
        missing = next((name for name in ours if name not in theirs), None)
        problem = f"has {counted(len(theirs), 'layer')}, the model {len(ours)}" if missing is None else f"has no layer {missing!r}"
        raise ConfigError(f"scaling.profile: {path} {problem}: it is of another model; profile this one: raypipe profile CONFIG -o {path}")
    if profile.microbatch_size != config.schedule.microbatch_size:
        raise ConfigError(
            f"scaling.profile: {path} was measured with microbatches of {profile.microbatch_size}, the run has "
            f"schedule.microbatch_size={config.schedule.microbatch_size}; set one to the other, or profile again"
        )
    return with_rows_of(profile, config.optimizer, notice, function=optimizer_function)


def measured_profile(
    config: TrainConfig,
    model: Model,
    make: ModelFunction,
    batches: BatchFunction,
    coordinator: Coordinator,
    notice: Notice,
    num_devices: int,
    optimizer_function: OptimizerFunction | None = None,
) -> ModelProfile:
    """Measure or estimate the layers on the first devices, which work at the same time."""
    source = config.scaling.profile
    is_estimate = source == ESTIMATED
    verb, count = ("estimating", 1) if is_estimate else ("measuring", num_devices)
    notice(f"{verb} {counted(len(model.layers), 'layer')} on {counted(count, 'device')}")
    measured = coordinator.measure(
        make,
        batches,
        optimizer=config.optimizer,
        optimizer_function=optimizer_function,
        seed=config.run.seed,
        num_devices=count,
        effort=ESTIMATES if is_estimate else USUAL_EFFORT,
        precision=config.model.precision,
        notice=notice,
        uses_cache=source is None,
    )
    notice(_said(measured, is_estimate=is_estimate))
    name = config.model.function.removeprefix(IN_PYTHON)
    profile = model_profile(measured, model, name=name, microbatch_size=config.schedule.microbatch_size)
    return with_rows_of(profile, config.optimizer, notice, function=optimizer_function)


def _said(measured: list[list[LayerMeasurement]], *, is_estimate: bool) -> str:
    layers = [layer for of_device in measured for layer in of_device]
    took = [layer.forward_s + layer.backward_s for layer in layers]
    whole = seconds(sum(took) / len(measured))
    if is_estimate:
        return f"layers take about {whole} for a microbatch, forward and backward, by one forward of each"
    spread = sum(layer.spread * took_s for layer, took_s in zip(layers, took, strict=True)) / (sum(took) or 1.0)
    return f"layers take {whole} for a microbatch, forward and backward, to within +-{spread:.0%}"
