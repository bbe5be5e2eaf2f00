"""The trained model of a run folder in this process: what `retrieval.py` and `answers.py` measure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import raypipe
from raypipe.data.fields import FieldDataset
from raypipe.data.prepare import check_exists
from raypipe.errors import InputError


class Measured:
    """The model of a run's last checkpoint, and the rows of one split of its data.

    Raises:
        InputError: The run is of another model function, has no checkpoint, or its data cannot be read.
    """

    def __init__(self, run: Path, *, split: str, function: str) -> None:
        config = raypipe.TrainConfig.load(run / "config.yaml")
        if config.model.function != function:
            raise InputError(f"{run} is a run of {config.model.function}, expected one of {function}")
        self.trained = raypipe.load(run)
        self.data_path = config.data.path
        check_exists(self.data_path, {name for layer in self.trained.model.layers for name in layer.batch})
        self.rows = FieldDataset(self.data_path, seed=0, split=split)

    @torch.inference_mode()
    def outputs(self, *, first: int, count: int, batch_size: int = 250) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield `count` rows in batches, each with the output of the model's last layer."""
        for start in range(first, first + count, batch_size):
            rows = self.rows.rows(start, min(batch_size, first + count - start))
            batch = {name: torch.from_numpy(values) for name, values in rows.items()}
            yield batch, self.trained(batch)


def from_command_line(description: str, *, function: str) -> Measured:
    """Return the trained model that the command line names, or end the program with what is wrong."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="folder that raypipe train wrote")
    parser.add_argument("--split", default="test", help="rows to measure on (default: test, which no run reads)")
    arguments = parser.parse_args()
    try:
        return Measured(arguments.run, split=arguments.split, function=function)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
