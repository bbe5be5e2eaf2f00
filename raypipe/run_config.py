"""The sections of a configuration about a run, its files, and what it does about failures."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from raypipe.artifacts.record import invalid, record


@record()
class FailureConfig:
    """What a run does about failures of devices, nodes and links.

    Attributes:
        max_failures: Most failures in a row that a run recovers from; they are counted anew once the run is past the window that failed.
            0 lets every failure end the run, which then keeps no copies of its state.
        copy_share: Largest share of the run's time that copies of its state, which a recovery goes on from, may take once their cost is
            known: the devices wait for them, and windows take longer beside them. Where copies after every window would take more,
            they are rarer, and the longer nothing fails, the rarer they are, down to a tenth of this share. 1 means after every window.
        spare_processes: Whether a process waits on each node to take the place of a lost one, with Python, torch and the model's modules
            loaded. It loads beside the first windows, when a processor is idle, reserves nothing, uses no GPU and takes some 300 MB of
            memory. If left out, only on nodes with more cores than their devices use; on a node that comes back, it loads in any case.
    """

    max_failures: NonNegativeInt = 3
    copy_share: Annotated[float, Field(gt=0, le=1)] = 0.05
    spare_processes: bool | None = None


class CheckpointMetric(StrEnum):
    """The losses by which a checkpoint may be kept; less is better."""

    LOSS = "loss"
    """The training loss of the last update."""
    VALIDATION_LOSS = "validation_loss"
    """The validation loss, where the weights were evaluated."""


class OnNonFinite(StrEnum):
    """What a run does about an update whose loss or gradient is infinite or no number."""

    STOP = "stop"
    """Skip it on all stages, and stop when three follow each other."""
    SKIP = "skip"
    """Skip it on all stages."""
    CONTINUE = "continue"
    """Do it all the same."""


@record()
class RunConfig:
    """The length of a run and the place of its results.

    Attributes:
        name: Name of the run; its folder in the storage path.
        storage_path: Folder of all runs, or a URI that one of pyarrow's file systems serves, such as `s3://bucket/runs`; with several
            nodes, a folder that all of them share.
        seed: Seed of weights, order of rows and dropout.
        num_updates: Updates of the run.
        evaluate_every: Updates between evaluations; 0 for one at the end.
        checkpoint_every: Updates between checkpoints; 0 for none by the number of updates. The end of a run always has one.
        checkpoint_every_s: Seconds of training after which a window's end has a checkpoint; 0 for none by time.
        num_to_keep: Newest checkpoints to keep; 0 for all.
        keep_best_by: Loss by which the best checkpoint is kept beside the newest; left out for none.
        grace_s: Seconds within which a run that is asked to stop, by Ctrl-C, SIGTERM or `ray job stop`, ends its window and saves; 0 to
            end at once. In a Ray job half of RAY_JOB_STOP_WAIT_TIME_S, which is 3 unless the cluster sets it, if that is no longer.
        on_nonfinite: What happens to updates whose loss or gradient norm is infinite or no number. Skipping does the window once more
            from the copy of the state before it, and needs `failure.max_failures`.
        sample_bytes: Bytes of text to generate at the end, for models of bytes; 0 for none.
        sample_prompt: Beginning of the generated text.
        show_progress: Whether the run shows what it does on stderr: a bar on a terminal, else plain lines.
    """

    name: str = "run"
    storage_path: str = "runs"
    seed: NonNegativeInt = 0
    # Windows are planned when a run begins.
    num_updates: Annotated[int, Field(ge=1, le=10_000_000, json_schema_extra={"remedy_above": "a longer run can be resumed"})] = 100
    evaluate_every: NonNegativeInt = 0
    checkpoint_every: NonNegativeInt = 0
    checkpoint_every_s: NonNegativeFloat = 600.0
    num_to_keep: NonNegativeInt = 3
    keep_best_by: CheckpointMetric | None = None
    grace_s: NonNegativeFloat = 30.0
    on_nonfinite: OnNonFinite = OnNonFinite.STOP
    sample_bytes: NonNegativeInt = 0
    sample_prompt: str = ""
    show_progress: bool = True

    def __post_init__(self) -> None:
        if not self.name or self.name != os.path.basename(self.name) or self.name in {".", ".."}:
            raise invalid(self, "name", f"expected a name for a folder, got {self.name!r}")
        if not self.name.isprintable():
            raise invalid(self, "name", f"expected a name without control characters, got {self.name!r}")
