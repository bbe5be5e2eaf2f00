"""How far two runs of the small GPT of `chaos.py` drift apart that differ in rounding alone.

    python benchmarks/rounding_drift.py [--updates 15000] [--json FILE]

The model of `chaos.py` in one process, float64, two copies of it side by side on the same data. From `--from` on the second adds the
gradients of an update's microbatches in reverse order, which changes sums by their last bits, as another cut of the model does. Printed is
the largest difference of their losses in each tenth of the run. What two such runs differ by, a recovery onto another cut may differ by.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rounds import print_table, write_json

from raypipe.actors.execution.batches import FileSource
from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.config import OptimizerConfig
from raypipe.data.prepare import prepare
from raypipe.model import Batch
from raypipe.models.gpt import gpt
from tests.multinode.chaos_run import MODEL_OPTIONS, NUM_MICROBATCHES, WARMUP_UPDATES

RUN_UPDATES = 1_000_000  # as in `chaos.py`: the rate depends on it
ROWS = 4


class Copy:
    """One copy of the model with its optimizer."""

    def __init__(self) -> None:
        self.model = gpt(**MODEL_OPTIONS)
        self.module = nn.Sequential(*(build_layer(layer, index=index, seed=0) for index, layer in enumerate(self.model.layers)))
        self.config = OptimizerConfig(warmup_updates=WARMUP_UPDATES)
        self.optimizer = build_optimizer(self.config, self.module.named_parameters())

    def update(self, number: int, batches: Sequence[Batch]) -> float:
        """Make one update; return its loss."""
        self.optimizer.zero_grad()
        losses = [self.model.loss(self.module(batch["tokens"]), batch) / len(batches) for batch in batches]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.module.parameters(), self.config.max_grad_norm or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(number, num_updates=RUN_UPDATES)
        self.optimizer.step()
        return sum(sorted(float(loss.detach()) for loss in losses))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=15_000)
    parser.add_argument("--from", type=int, default=1_600, dest="first", help="update from which gradients are added in another order")
    parser.add_argument("--json", help="file for all values")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tenth = max(options.updates // 10, 1)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.parquet"
        prepare(str(Path(__file__).resolve().parents[1] / "docs"), output=tokens, validation_fraction=0.1)
        source = FileSource(str(tokens), MODEL_OPTIONS["sequence_length"], 0, ROWS)("train")
        first, second = Copy(), Copy()
        differences = []
        for update in range(options.updates):
            batches = [source.batch(update * NUM_MICROBATCHES + number, (0.0, 1.0)) for number in range(NUM_MICROBATCHES)]
            other = batches if update < options.first else batches[::-1]
            differences.append(abs(first.update(update, batches) - second.update(update, other)))
            if (update + 1) % tenth == 0:
                print(f"{update + 1} of {options.updates} updates", file=sys.stderr, flush=True)
    rows = [
        {"updates": f"{begin + 1} to {begin + tenth}", "largest difference of losses": f"{max(differences[begin : begin + tenth]):.1e}"}
        for begin in range(0, tenth * 10, tenth)
    ]
    print_table("the same run, gradients added in another order", rows)
    write_json(
        options.json, [{"first": options.first, "largest": [max(differences[at : at + tenth]) for at in range(0, tenth * 10, tenth)]}]
    )


if __name__ == "__main__":
    main()
