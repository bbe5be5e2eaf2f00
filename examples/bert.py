"""Trains a BERT-like masked language model: its rows are tokens of which some are masked, made while training.

raypipe data prepare python-stdlib -o data/python-stdlib.parquet
python examples/bert.py
"""

from __future__ import annotations

import argparse
import os

from raypipe import DataConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, Trainer
from raypipe.actors.execution.batches import MaskedTokenSource
from raypipe.config import CheckpointMetric

SEQUENCE_LENGTH = 128
MICROBATCH_SIZE = 8


def main() -> None:
    """Train over two stages, and print the losses."""
    parser = argparse.ArgumentParser(description="Train a BERT-like model of bytes.")
    parser.add_argument("--data", default="data/python-stdlib.parquet")
    parser.add_argument("--num-updates", type=int, default=200)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=256)
    arguments = parser.parse_args()
    result = Trainer(
        "raypipe.models.bert:bert",
        model_options={"num_layers": arguments.num_layers, "d_model": arguments.d_model, "sequence_length": SEQUENCE_LENGTH},
        batches=MaskedTokenSource(
            path=os.path.abspath(arguments.data), sequence_length=SEQUENCE_LENGTH, seed=0, microbatch_size=MICROBATCH_SIZE
        ),
        data_config=DataConfig(path="", num_validation_microbatches=8),
        schedule_config=ScheduleConfig(num_microbatches=4, microbatch_size=MICROBATCH_SIZE),
        optimizer_config=OptimizerConfig(learning_rate=1e-3),
        scaling_config=ScalingConfig(num_devices=2),
        run_config=RunConfig(
            name="bert", num_updates=arguments.num_updates, evaluate_every=50, keep_best_by=CheckpointMetric.VALIDATION_LOSS
        ),
        callbacks=["csv"],
    ).fit()
    first, last = result.validation_losses[0][1], result.validation_losses[-1][1]
    print(f"validation loss of masked bytes {first:.3f} -> {last:.3f}, everything is in {result.path}")


if __name__ == "__main__":
    main()
