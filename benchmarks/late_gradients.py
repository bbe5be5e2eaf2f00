"""What one update of delay costs each optimizer: a GPT under `1f1b` and under `pipedream-2bw`, where all gradients are one update late.

    python benchmarks/late_gradients.py [--data data/python-stdlib.parquet] [--optimizers nadamw90 muon] [-o late-gradients.json]

The GPT, its rows and its warm-up are those of `convergence.py`, in 300 updates at one learning rate for all. Finished runs lie in `--runs`;
what is there is not run again. The cost is the validation loss with the delay less that without, of the optimizer without corrections.
Printed and written, as JSON, with the bytes of state that the optimizer keeps for a byte of weights, and the seconds of a core that a step
of it takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from convergence_runs import OPTIMIZERS, TASKS, Run, Runs, final_loss
from rounds import print_table

from raypipe.actors.stage.optimizer_state import flat_state
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.precision import build_stage
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.schedules.ir import WeightRule

NUM_TIMED = 5
WITHOUT, WITH = "1f1b", "pipedream-2bw"
COMPARED = ("nadamw90", "nadamw90-ahead", "nadamw90-corrected", "muon", "muon-ahead", "muon-corrected", "muon-nadamw-corrected")


def state_and_step(optimizer: str) -> tuple[float, float]:
    """Return the bytes of state for a byte of the model's weights, and the seconds of a core that a step takes."""
    torch.set_num_threads(1)
    model = TASKS["gpt"].model()
    make = partial(build_optimizer, OPTIMIZERS[optimizer].optimizer)
    cut = Cut.equal(len(model.layers), 1, model.edges())
    weights = build_stage(model, cut, 0, optimizer=make, rule=WeightRule.FLUSH, seed=0, precision=Precision.FLOAT32)
    assert weights.optimizer is not None
    for master in weights.masters:
        master.grad = torch.ones_like(master)
    weights.optimizer.step()
    since_s = time.process_time()
    for _ in range(NUM_TIMED):
        weights.optimizer.step()
    step_s = (time.process_time() - since_s) / NUM_TIMED
    states = (flat_state(state) for state in weights.optimizer.state.values())
    held = sum(tensor.nbytes for state in states for tensor in state.values())
    return held / sum(master.nbytes for master in weights.masters), step_s


def losses(runs: Runs, optimizer: str, case: str, arguments: argparse.Namespace) -> list[float]:
    """Return the validation loss of each seed, in the order of the seeds."""
    wanted = [Run("gpt", optimizer, case, arguments.updates, arguments.learning_rate, seed) for seed in arguments.seeds]
    if arguments.report:
        wanted = [run for run in wanted if run.path(runs.folder).exists()]
    return [final_loss(rows) for rows in runs.finish(wanted)]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, if there are any values."""
    return sum(values) / len(values) if values else None


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(COMPARED))
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--data", type=Path, default=Path("data/python-stdlib.parquet"))
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "results" / "late-gradients")
    parser.add_argument("--report", action="store_true", help="only of runs that are finished")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def main() -> None:
    """Run and report."""
    arguments = parsed()
    runs = Runs(arguments.runs, arguments.data)
    rows = []
    for optimizer in arguments.optimizers:
        without = mean(losses(runs, optimizer.partition("-")[0], WITHOUT, arguments))  # a correction is for late gradients
        late = mean(losses(runs, optimizer, WITH, arguments))
        rows.append({
            "optimizer": optimizer,
            WITHOUT: without,
            WITH: late,
            "cost": late - without if late is not None and without is not None else None,
            **dict(zip(("state", "step_s"), state_and_step(optimizer), strict=True)),
        })
    title = f"validation loss after {arguments.updates} updates at {arguments.learning_rate:g}, seeds {arguments.seeds}"
    print_table(title, [{key: "" if (value := row[key]) is None else _text(value) for key in row} for row in rows])
    if arguments.output:
        described = {
            "updates": arguments.updates,
            "learning_rate": arguments.learning_rate,
            "seeds": arguments.seeds,
            "torch": torch.__version__,
        }
        arguments.output.write_text(json.dumps(described | {"optimizers": rows}, indent=1) + "\n", encoding="utf-8")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


if __name__ == "__main__":
    main()
