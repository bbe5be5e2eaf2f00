"""What an update waits for, and what that costs: ZB-H2 over six updates gains on ZB-H1 with scope `stage`, not with `global`.

    python benchmarks/update_scope.py [--rounds 5] [--wait-ms 8]

Stages wait instead of computing (F = I = W), so that two cores are enough for four stages; everything else is real: Ray actors,
gloo, the executor. All cases run in every round, in turn; printed are medians over the rounds of the time per update,
with half the distance of the quartiles, beside the simulator's prediction from the nominal waits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial

import ray
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from raypipe import Layer, Model, RunConfig, ScalingConfig, ScheduleConfig, Trainer
from raypipe.cost import equal_stages
from raypipe.model import Batch
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Size, UpdateScope
from raypipe.schedules.lower import lower
from raypipe.simulate import simulate

NUM_DEVICES = 4
NUM_MICROBATCHES = 12
NUM_UPDATES = 6
CASES = (
    ("1f1b", UpdateScope.GLOBAL),
    ("zb-h1", UpdateScope.GLOBAL),
    ("zb-h2", UpdateScope.GLOBAL),
    ("zb-h2", UpdateScope.STAGE),
)


class _WaitInBackward(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.wait_s)  # type: ignore[attr-defined]
        return gradients[0], None


class Waiting(nn.Module):
    """Waits as long in its forward as in its input gradient and its weight gradient.

    The wait of the weight gradient lies on the weight's own branch of the graph, the other on that of the input.
    """

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x + weight, [B, 64]."""
        time.sleep(self.wait_s)
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        result: Tensor = _WaitInBackward.apply(leaf, self.wait_s) + _WaitInBackward.apply(self.weight, self.wait_s)  # type: ignore[no-untyped-call]
        return result


class Entry(nn.Module):
    """Passes the rows on, through a weight, so that the first stage has an input gradient to wait for as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x + weight, [B, 64]."""
        return x + self.weight


def waiting_model(wait_s: float) -> Model:
    """An entry and one waiting layer a stage."""
    layers = [Layer("entry", Entry, inputs=(), batch=("inputs",))]
    layers += [Layer(f"wait-{number}", partial(Waiting, wait_s)) for number in range(NUM_DEVICES)]
    return Model(tuple(layers), mean)


def mean(output: Tensor, batch: Batch) -> Tensor:
    """The mean of the output."""
    return output.mean() + 0 * batch["inputs"].mean()


@dataclass(frozen=True)
class Zeros:
    """Rows of zeros."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """The rows, whatever the microbatch."""
        assert rows == (0.0, 1.0), microbatch
        return {"inputs": torch.zeros(8, 64)}


def rows(split: str) -> Zeros:
    """The rows of a split."""
    assert split
    return Zeros()


def measured_update_s(name: str, scope: UpdateScope, wait_s: float, folder: str) -> float:
    """Seconds per update over the window, as the actors' clocks have it: from the first Op to the last."""
    result = Trainer(
        waiting_model,
        model_options={"wait_s": wait_s},
        batches=rows,
        schedule_config=ScheduleConfig(name=name, num_microbatches=NUM_MICROBATCHES, update_scope=scope, updates_per_window=NUM_UPDATES),
        scaling_config=ScalingConfig(num_devices=NUM_DEVICES, layers_per_stage=(2, *[1] * (NUM_DEVICES - 1))),
        run_config=RunConfig(name=f"{name}-{scope}", storage_path=folder, num_updates=2 * NUM_UPDATES),
    ).fit()
    figures = {figure.name: figure.measured for figure in result.figures}
    return figures["update time"]


def predicted_update_s(name: str, scope: UpdateScope, wait_s: float) -> float:
    """The same by simulation with the nominal waits."""
    schedule = build(name, Size(NUM_DEVICES, NUM_MICROBATCHES, NUM_UPDATES, update_scope=scope))
    cost = equal_stages(schedule, forward_s=wait_s, backward_s=2 * wait_s, weight_grad_s=wait_s)
    return simulate(lower(schedule), cost, name=name, num_updates=NUM_UPDATES).update_s


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait-ms", type=float, default=8.0)
    arguments = parser.parse_args()
    wait_s = arguments.wait_ms / 1e3
    found: dict[tuple[str, UpdateScope], list[float]] = {case: [] for case in CASES}
    ray.init(address="local", num_cpus=NUM_DEVICES + 1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for name, scope in CASES:
                found[name, scope].append(measured_update_s(name, scope, wait_s, folder))
    ray.shutdown()
    table = Table(
        title=f"{NUM_DEVICES} stages, {NUM_MICROBATCHES} microbatches, {NUM_UPDATES} updates a window, F = I = W = {arguments.wait_ms} ms"
    )
    for column in ("schedule", "scope", "predicted s", "measured s", "spread", "measured / predicted", "against 1f1b"):
        table.add_column(column, justify="left" if column in {"schedule", "scope"} else "right")
    base = statistics.median(found[CASES[0]])
    for (name, scope), values in found.items():
        predicted, measured = predicted_update_s(name, scope, wait_s), statistics.median(values)
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [measured] * 3
        table.add_row(
            name,
            scope,
            f"{predicted:.4f}",
            f"{measured:.4f}",
            f"{(quartiles[2] - quartiles[0]) / 2:.4f}",
            f"{measured / predicted:.3f}",
            f"{base / measured:.3f}x",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
