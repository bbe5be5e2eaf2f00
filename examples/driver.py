"""Trains a small GPT from Python instead of from a YAML file.

raypipe data prepare python-stdlib -o data/python-stdlib.parquet
python examples/driver.py
"""

from __future__ import annotations

from raypipe import DataConfig, RunConfig, ScalingConfig, ScheduleConfig, Trainer


def main() -> None:
    """Train for 20 updates over two stages, and print the losses."""
    result = Trainer(
        "raypipe.models.gpt:gpt",
        model_options={"num_layers": 4, "d_model": 128, "sequence_length": 64},
        data_config=DataConfig(path="data/python-stdlib.parquet", sequence_length=64),
        schedule_config=ScheduleConfig(name="zb-h1", num_microbatches=4, microbatch_size=4),
        scaling_config=ScalingConfig(num_devices=2),
        run_config=RunConfig(name="driver", num_updates=20),
    ).fit()
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}, everything is in {result.path}")


if __name__ == "__main__":
    main()
