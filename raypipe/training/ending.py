"""What a run leaves that ends before its last update, and the result of one that has all of them."""

from __future__ import annotations

from typing import Any

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.plan import Plan
from raypipe.errors import RaypipeError
from raypipe.training.record import RunRecord, write_report
from raypipe.training.result import Result, StoppedRun
from raypipe.training.run_cluster import Notice
from raypipe.training.run_folder import FAILURE, RunFolder


def leave(folder: RunFolder, record: RunRecord, error: BaseException, *, update: int, notice: Notice) -> None:
    """Write why a run ended, and trace and timeline as far as it came; whatever goes wrong with that hides no reason."""
    is_interrupted = isinstance(error, KeyboardInterrupt)
    problem = "stopped on request" if isinstance(error, StoppedRun) else "interrupted" if is_interrupted else str(error)
    try:
        folder.write_json(FAILURE, {"problem": problem, "kind": type(error).__name__, "updates": update})
        if record.measured is not None and (isinstance(error, StoppedRun) or not is_interrupted):
            write_report(folder, record.measured, notes=record.notes)
        folder.publish()
    except (OSError, RaypipeError) as other:
        notice(f"{folder.name}: the reason or the trace of this end could not be written ({other})")


def finished_result(folder: RunFolder, checkpoint: Checkpoint, notice: Notice) -> Result:
    """Return the result of a run that has all of its updates, from its records."""
    notice(f"{folder.name} has all of its {checkpoint.index.update} updates already")
    lines = folder.metrics()
    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "validation_loss" in line]
    figures: dict[str, Any] = {key: value for key, value in (steps[-1] if steps else {}).items() if key not in {"update", "grad_norm"}}
    figures |= {"updates": checkpoint.index.update} | ({"validation_loss": validations[-1]["validation_loss"]} if validations else {})
    sample = folder.file("sample.txt")
    return Result(
        path=folder.name,
        metrics=figures,
        losses=[line["loss"] for line in steps],
        validation_losses=[(line["update"], line["validation_loss"]) for line in validations],
        checkpoint=checkpoint,
        plan=Plan.load(folder.file("plan.json")),
        figures=[],
        sample=sample.read_text(encoding="utf-8") if sample.is_file() else "",
    )
