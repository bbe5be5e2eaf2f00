"""Where the windows of a run end: evaluations, checkpoints, `updates_per_window` and each of the `synchronous_updates` end one."""

from __future__ import annotations

from raypipe.config import TrainConfig


def is_due(every: int, update: int) -> bool:
    """Return whether what happens every so many updates, 0 for never, happens behind this one."""
    return bool(every) and update % every == 0


def window_size(config: TrainConfig, first: int) -> int:
    """Return the number of updates of the window that begins behind an update."""
    if first < config.schedule.synchronous_updates:
        return 1
    run = config.run
    intervals = (run.evaluate_every if config.data.num_validation_microbatches else 0, run.checkpoint_every)
    ends = [first + config.schedule.updates_per_window, run.num_updates]
    ends += [(first // every + 1) * every for every in intervals if every]
    return min(ends) - first


def window_sizes(config: TrainConfig, first: int) -> set[int]:
    """Return the sizes of all windows of a run from an update on."""
    sizes: set[int] = set()
    while first < config.run.num_updates:
        size = window_size(config, first)
        sizes.add(size)
        first += size
    return sizes
