"""The run that `benchmarks/chaos.py` strikes, which tells how it goes: one JSON document a line.

    python -m tests.multinode.chaos_run STORAGE TOKENS NUM_UPDATES MODE DEVICE_MS [PLAN]

In mode `recover` the run recovers from failures itself, in modes `spares` and `no-spares` with and without spare processes. In mode
`restart` it does what a framework does that starts all workers anew from the last checkpoint, in the same driver and with the same plan;
where devices are missing it waits for them. With `DEVICE_MS` above 0, each layer waits so many milliseconds for a row, as for a GPU.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray

from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.config import ClusterConfig, DataConfig, FailureConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.errors import InputError, RunError
from raypipe.training.trainer import Trainer
from tests.multinode.adapting_run import tell

NUM_DEVICES = 4
NUM_MICROBATCHES = 4
WARMUP_UPDATES = 20
MODEL_OPTIONS: dict[str, Any] = {"num_layers": 6, "d_model": 64, "num_heads": 2, "sequence_length": 32, "dtype": "float64"}
SPARES = {"spares": True, "no-spares": False}
CHECKPOINT_EVERY_S = 20.0
_RETRY_S = 1.0


class Lines(Callback):
    """Writes what a run says."""

    def on_notice(self, text: str) -> None:
        tell(notice=text, at_s=time.time())

    def on_window(self, run: Run, window: Window) -> None:
        tell(update=window.update, update_s=window.update_s, at_s=time.time())


def main() -> None:
    """Run."""
    storage, tokens, num_updates, mode, device_ms, *plan = sys.argv[1:]
    on_device = {"row_s": float(device_ms) / 1e3} if float(device_ms) else {}
    trainer = Trainer(
        callbacks=[Lines()],
        model="tests.multinode.gpt_on_device:gpt_on_device" if on_device else "raypipe.models.gpt:gpt",
        model_options=MODEL_OPTIONS | on_device,
        data_config=DataConfig(path=tokens, sequence_length=MODEL_OPTIONS["sequence_length"], num_validation_microbatches=0),
        schedule_config=ScheduleConfig()
        if plan
        else ScheduleConfig(num_microbatches=NUM_MICROBATCHES, microbatch_size=4, updates_per_window=5),
        optimizer_config=OptimizerConfig(warmup_updates=WARMUP_UPDATES),
        scaling_config=ScalingConfig(num_devices=NUM_DEVICES),
        cluster_config=ClusterConfig(message_timeout_s=8.0, silence_timeout_s=4.0, log_to_driver=False),
        run_config=RunConfig(name="run", storage_path=storage, num_updates=int(num_updates), checkpoint_every_s=CHECKPOINT_EVERY_S),
        failure_config=FailureConfig(max_failures=0 if mode == "restart" else 10, spare_processes=SPARES.get(mode)),
        plan=plan[0] if plan else None,
    )
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    while True:
        try:
            trainer.fit(resume="auto")
        except (RunError, InputError) as error:
            if mode != "restart" and isinstance(error, RunError):
                raise
            tell(notice=f"started anew after: {error}", at_s=time.time())
            time.sleep(_RETRY_S)
        else:
            return


if __name__ == "__main__":
    main()
