"""What late gradients cost a small GPT in loss, emulated in one process on one core: 200 updates in about 15 seconds.

    python benchmarks/late_emulator.py [--schedules 1f1b amdp] [--rounds 8] [--optimizers muon] [--synchronous 0 39] [--seeds 0 1 2]
    python benchmarks/late_emulator.py --report

The order says by how many updates the weights are old that a stage reads for a row, forwards and backwards (`same_delays.py`). The emulator
reads these versions from two flat vectors, adds the gradients of the rows, clips by the global norm and steps all stages:

    share of the rows, amdp with K = 8    4/64    4/64    56/64
    stages 0 to 6, forward and backward    1 0     1 0     0 0      1: one update old
    stage 7                                1 1     0 0     0 0

The model has 6 blocks of width 48 between embedding and head, each of these 8 layers a stage (0.2 million parameters); an update has 32
rows of 64 tokens. The rate rises over a fifth of the updates and falls to a tenth along a cosine. The optimizers are NAdamW, and Muon
beside NAdamW as in `convergence_runs.py`, but orthogonalized in float32 and all matrices of a shape at once. `tests/test_late_emulator.py`
compares losses with those of the executor. Finished runs are lines of a file and are not computed again. Printed is the validation loss
after the last update, mean over the seeds, and the difference to `1f1b` with the same seed, optimizer and rate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rounds import print_table
from same_delays import Delays
from torch import Tensor, nn

from raypipe.artifacts.cut import Cut
from raypipe.data.samples import Split
from raypipe.data.tokens import TokenDataset
from raypipe.learning_rates import learning_rate
from raypipe.model import Model
from raypipe.models.gpt import gpt
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.request import ScheduleRequest

NUM_DEVICES = 8
NUM_POSITIONS = 64
NUM_ROWS = 32
"""Of an update."""
NUM_VALIDATION_ROWS, NUM_ROWS_AT_ONCE = 256, 64
WARMUP, FINAL_RATE = 0.2, 0.1
BETA1, BETA2, MOMENTUM, EPSILON, WEIGHT_DECAY, MAX_GRAD_NORM = 0.9, 0.95, 0.95, 1e-8, 0.1, 1.0
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
SYNCHRONOUS = "1f1b"
MATRICES = ("attention_in.weight", "attention_out.weight", "mlp_in.weight", "mlp_out.weight")
"""Those that Muon steps: all but embeddings and head."""
RESULTS = Path(__file__).parent / "results" / "late-emulator.jsonl"


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        rounds: K, rounds of 8 microbatches in an update.
        optimizer: `muon` or `nadamw`.
        gradient_correction: As in the configuration's `optimizer`.
        synchronous_updates: As in the configuration's `schedule`.
    """

    schedule: str
    rounds: int
    optimizer: str
    learning_rate: float
    seed: int
    num_updates: int
    gradient_correction: float = 0.0
    synchronous_updates: int = 0

    def on_time(self) -> Cell:
        """Return the run with which this one is compared."""
        return replace(self, schedule=SYNCHRONOUS, rounds=1, gradient_correction=0.0, synchronous_updates=0)


# Weights


class FlatModel:
    """A model whose weights, and their gradients, are parts of one vector each, with the matrices for Muon first.

    Attributes:
        weights: What forwards and backwards read now.
        gradients: Sums of what backwards gave.
        layer: Number of the layer of each weight.
        decay: Weight decay of each weight.
        stacks: First weight, number and shape of the matrices of each kind.
    """

    def __init__(self, model: Model, *, seed: int) -> None:
        self.loss_function = model.loss
        self.layers = [seeded(model, number, seed) for number in range(len(model.layers))]
        named = [(name, number, weight) for number, layer in enumerate(self.layers) for name, weight in layer.named_parameters()]
        kinds = [[each for each in named if each[0] == kind] for kind in MATRICES]
        ordered = [each for kind in kinds for each in kind] + [each for each in named if each[0] not in MATRICES]
        sizes = [weight.numel() for _, _, weight in ordered]
        self.num_in_matrices = sum(weight.numel() for kind in kinds for _, _, weight in kind)
        self.weights = torch.cat([weight.detach().flatten() for _, _, weight in ordered])
        self.gradients = torch.zeros_like(self.weights)
        numbers, decays = [number for _, number, _ in ordered], [WEIGHT_DECAY * (weight.dim() > 1) for _, _, weight in ordered]
        self.layer = torch.repeat_interleave(torch.tensor(numbers), torch.tensor(sizes))
        self.decay = torch.repeat_interleave(torch.tensor(decays), torch.tensor(sizes))
        self.stacks: list[tuple[int, int, tuple[int, int]]] = []
        first = 0
        for kind in kinds:
            rows, columns = kind[0][2].shape
            self.stacks.append((first, len(kind), (rows, columns)))
            first += len(kind) * rows * columns
        parts, gradients = torch.split(self.weights, sizes), torch.split(self.gradients, sizes)
        for (_, _, weight), part, gradient in zip(ordered, parts, gradients, strict=True):
            weight.data, weight.grad = part.view(weight.shape), gradient.view(weight.shape)

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean loss of rows of one token more than the model has positions."""
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        value = self.layers[0](tokens)
        for layer in self.layers[1:]:
            value = layer(value)
        loss: Tensor = self.loss_function(value, {"targets": targets})
        return loss


def seeded(model: Model, number: int, seed: int) -> nn.Module:
    """Return a layer with the first weights of a seed."""
    torch.manual_seed(1000 * seed + number)
    return model.layers[number].build()


# Delays


@dataclass(frozen=True)
class Group:
    """Rows of an update that read the same versions.

    Attributes:
        share: Of the rows of an update; groups follow each other.
        forward: Whether a forward reads the version before the newest, by stage.
        backward: The same of backwards.
    """

    share: float
    forward: tuple[bool, ...]
    backward: tuple[bool, ...]


def groups(schedule: str, rounds: int) -> tuple[Group, ...]:
    """Return what the rows of an update read, far from the start of a window."""
    if schedule == SYNCHRONOUS:
        return (Group(1.0, (False,) * NUM_DEVICES, (False,) * NUM_DEVICES),)
    order = build(schedule, ScheduleRequest(NUM_DEVICES, NUM_DEVICES * rounds, 6, update_scope=UpdateScope.GLOBAL))
    delays = Delays.of(order, Cut.equal(NUM_DEVICES, NUM_DEVICES, tuple((stage, stage + 1) for stage in range(NUM_DEVICES - 1))))
    assert delays.period == 1, "all updates are alike"
    of_stage = {stage: row for stages, row in zip(delays.layers, delays.tables[-1], strict=True) for stage in stages}
    counts: dict[tuple[tuple[int, int], ...], int] = defaultdict(int)
    for number in range(delays.num_microbatches):
        counts[tuple(of_stage[stage][number] for stage in range(NUM_DEVICES))] += 1
    assert max(max(pair) for column in counts for pair in column) <= 1, "two versions are kept"
    return tuple(
        Group(count / delays.num_microbatches, tuple(old == 1 for old, _ in column), tuple(old == 1 for _, old in column))
        for column, count in counts.items()
    )


# Steps


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return Muon's direction for a stack of matrices (Jordan et al. 2024)."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT.contiguous() if is_tall else matrices
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    result: Tensor = found.mT if is_tall else found
    return result


class Steps:
    """The optimizer of all stages, on vectors; the first `num_muon` weights are Muon's, the others NAdamW's."""

    def __init__(self, model: FlatModel, *, with_muon: bool) -> None:
        self.num_muon = model.num_in_matrices if with_muon else 0
        self.stacks = model.stacks if with_muon else []
        self.first = torch.zeros_like(model.weights)
        self.second = torch.zeros_like(model.weights)
        self.num_done = 0

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the step for a learning rate of 1, without weight decay."""
        self.num_done += 1
        found = torch.empty_like(gradient)
        muon, others = slice(0, self.num_muon), slice(self.num_muon, None)
        self.first[muon] += (gradient[muon] - self.first[muon]) * (1 - MOMENTUM)
        ahead = gradient[muon] + (self.first[muon] - gradient[muon]) * MOMENTUM
        for first, count, (rows, columns) in self.stacks:
            part = slice(first, first + count * rows * columns)
            step = orthogonalized(ahead[part].view(count, rows, columns))
            found[part] = (step * (-0.2 * math.sqrt(max(rows, columns)))).reshape(-1)
        self.first[others] += (gradient[others] - self.first[others]) * (1 - BETA1)
        self.second[others] = self.second[others] * BETA2 + (1 - BETA2) * gradient[others] * gradient[others]
        scale = (self.second[others] / (1 - BETA2**self.num_done)).sqrt() + EPSILON
        now, next_ = (1 - BETA1) / (1 - BETA1**self.num_done), BETA1 / (1 - BETA1 ** (self.num_done + 1))
        found[others] = -(now * gradient[others] + next_ * self.first[others]) / scale
        return found


# A run


def clipped(gradients: Tensor) -> Tensor:
    """Return gradients whose norm is at most `MAX_GRAD_NORM`."""
    norm = float(gradients.norm())
    return gradients * (MAX_GRAD_NORM / (norm + 1e-6)) if norm > MAX_GRAD_NORM else gradients.clone()


def small_gpt() -> Model:
    """Return the model of all runs."""
    return gpt(num_layers=NUM_DEVICES - 2, d_model=48, num_heads=4, sequence_length=NUM_POSITIONS)


def rate(cell: Cell, update: int) -> float:
    """Return the learning rate of an update."""
    return learning_rate(
        update,
        name="cosine",
        highest=cell.learning_rate,
        final=FINAL_RATE * cell.learning_rate,
        num_updates=cell.num_updates,
        warmup_updates=round(WARMUP * cell.num_updates),
        decay_updates=None,
    )


def train(cell: Cell, data: Path, *, num_updates: int | None = None) -> tuple[list[float], float]:
    """Return the training loss of each update and the validation loss after the last; of the first `num_updates` where given."""
    model = FlatModel(small_gpt(), seed=cell.seed)
    steps = Steps(model, with_muon=cell.optimizer == "muon")
    rows = TokenDataset(data, sequence_length=NUM_POSITIONS, seed=cell.seed, split=Split.TRAIN)
    late, on_time = groups(cell.schedule, cell.rounds), groups(SYNCHRONOUS, 1)
    newest, before = model.weights.clone(), model.weights.clone()
    last_gradient = None
    losses = []
    for update in range(num_updates or cell.num_updates):
        # The first update of a window has nothing late, and the run behind the synchronous ones is one window.
        of_update = late if update > cell.synchronous_updates else on_time
        batch = torch.from_numpy(rows.rows(update * NUM_ROWS, NUM_ROWS))
        model.gradients.zero_()
        first, loss = 0, 0.0
        delay = torch.zeros(NUM_DEVICES)
        for group in of_update:
            end = first + round(group.share * NUM_ROWS)
            model.weights.copy_(torch.where(torch.tensor(group.forward)[model.layer], before, newest))
            of_group = model.loss(batch[first:end])
            model.weights.copy_(torch.where(torch.tensor(group.backward)[model.layer], before, newest))
            (of_group * group.share).backward()  # type: ignore[no-untyped-call]
            loss += of_group.item() * group.share
            delay += group.share * torch.tensor(group.forward)
            first = end
        assert first == NUM_ROWS, "shares are whole rows"
        losses.append(loss)
        gradient = clipped(model.gradients)
        corrected = gradient
        if last_gradient is not None:
            corrected = gradient + cell.gradient_correction * delay[model.layer] * (gradient - last_gradient)
        last_gradient = gradient
        step = steps.direction(corrected) - model.decay * newest
        before, newest = newest, newest + rate(cell, update) * step
    model.weights.copy_(newest)
    held_out = TokenDataset(data, sequence_length=NUM_POSITIONS, seed=0, split=Split.VALIDATION)
    with torch.no_grad():
        parts = [
            float(model.loss(torch.from_numpy(held_out.rows(first, NUM_ROWS_AT_ONCE))))
            for first in range(0, NUM_VALIDATION_ROWS, NUM_ROWS_AT_ONCE)
        ]
    return losses, fmean(parts)


# Results


def finished(path: Path) -> dict[Cell, float]:
    """Return the validation loss of each run in a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    read: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {Cell(**{name: value for name, value in line.items() if name != "validation_loss"}): line["validation_loss"] for line in read}


def report(found: dict[Cell, float]) -> None:
    """Print the mean of the seeds of each run, and of the differences to runs without late gradients."""
    alike: dict[Cell, list[Cell]] = defaultdict(list)
    for cell in found:
        alike[replace(cell, seed=0)].append(cell)
    rows = []
    for one, cells in sorted(alike.items(), key=lambda pair: (pair[0].optimizer, pair[0].learning_rate, pair[0].schedule, -pair[0].rounds)):
        more = [found[cell] / found[cell.on_time()] - 1 for cell in cells if cell.on_time() in found and cell != cell.on_time()]
        spread = f" +- {stdev(more):.2%}" if len(more) > 1 else ""
        rows.append({
            "optimizer": f"{one.optimizer}, C = {one.gradient_correction:g}" if one.gradient_correction else one.optimizer,
            "rate": f"{one.learning_rate:g}",
            "schedule": f"{one.schedule}, K = {one.rounds}",
            "synchronous": f"{one.synchronous_updates} of {one.num_updates}",
            "seeds": f"{len(cells)}",
            "loss": f"{fmean(found[cell] for cell in cells):.4f}",
            "over 1f1b": f"{fmean(more):+.2%}{spread}" if more else "",
        })
    print_table("validation loss after the last update", rows)


def wanted(options: argparse.Namespace) -> Sequence[Cell]:
    """Return the runs that the options ask for, without corrections where nothing is late."""
    cells = []
    for seed, optimizer, schedule, rounds, start, correction in product(
        options.seeds, options.optimizers, options.schedules, options.rounds, options.synchronous, options.corrections
    ):
        cell = Cell(schedule, rounds, optimizer, options.rate, seed, options.updates, correction, start)
        cells.append(cell.on_time() if schedule == SYNCHRONOUS else cell)
    return list(dict.fromkeys(cells))


def main() -> None:
    """Compute what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=[SYNCHRONOUS, "amdp", "pipedream-2bw"], default=[SYNCHRONOUS, "amdp"])
    parser.add_argument("--rounds", nargs="+", type=int, default=[8], help="K")
    parser.add_argument("--optimizers", nargs="+", choices=["muon", "nadamw"], default=["muon"])
    parser.add_argument("--corrections", nargs="+", type=float, default=[1.0], help="factors of the gradient correction")
    parser.add_argument("--synchronous", nargs="+", type=int, default=[0, 39], metavar="UPDATES", help="`schedule.synchronous_updates`")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=0.032)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--data", type=Path, default=Path("data/python-stdlib.parquet"))
    parser.add_argument("--report", action="store_true", help="compute nothing")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = finished(options.output)
    for cell in wanted(options) if not options.report else ():
        if cell not in found:
            found[cell] = round(train(cell, options.data)[1], 5)
            print(f"{cell}: {found[cell]}", flush=True)
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cell) | {"validation_loss": found[cell]}) + "\n")
    report(found)


if __name__ == "__main__":
    main()
