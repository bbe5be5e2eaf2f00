"""Stage actors on GPUs: several on one where there is no other, each a process of its own, with messages over NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raypipe.actors.execution.faults import Fault, FaultKind, FaultScript
from raypipe.config import ClusterConfig, FailureConfig, OptimizerConfig, Precision, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.errors import RunError, StageFailedError
from raypipe.model import Batch
from raypipe.models.gpt import gpt
from raypipe.schedules.ir import UpdateScope
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer
from tests.actors.oracles import RandomTokens, train_unsplit
from tests.spares import watch_spares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("ray_with_gpus"),
]

NUM_UPDATES = 20
NUM_MICROBATCHES = 4
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 0.5
SIZES = {"num_layers": 6, "d_model": 64, "num_heads": 4, "sequence_length": 16, "vocabulary_size": 256}


def rows(split: str) -> RandomTokens:
    assert split in {"train", "validation"}
    return RandomTokens()


class SameTokens(RandomTokens):
    """The same rows in each microbatch, which can be learned."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        return super().batch(0, rows)


def train(
    folder: Path,
    schedule: str,
    num_devices: int,
    *,
    precision: Precision = Precision.FLOAT32,
    compile_layers: bool = False,
    batches: Callable[[str], RandomTokens] = rows,
    faults: FaultScript | None = None,
    num_updates: int = NUM_UPDATES,
    message_timeout_s: float = 60.0,
    max_failures: int = 0,
) -> Result:
    share = min(1.0, torch.cuda.device_count() / num_devices)
    return Trainer(
        "raypipe.models.gpt:gpt",
        model_options=SIZES,
        precision=precision,
        compile_layers=compile_layers,
        batches=batches,
        schedule_config=ScheduleConfig(
            name=schedule, num_microbatches=NUM_MICROBATCHES, microbatch_size=2, updates_per_window=5, update_scope=UpdateScope.GLOBAL
        ),
        optimizer_config=OptimizerConfig(
            learning_rate=LEARNING_RATE,
            final_learning_rate=LEARNING_RATE,
            warmup_updates=0,
            beta2=0.999,
            weight_decay=0.01,
            max_grad_norm=MAX_GRAD_NORM,
        ),
        scaling_config=ScalingConfig(num_devices=num_devices, use_gpu=True, gpus_per_device=share),
        cluster_config=ClusterConfig(message_timeout_s=message_timeout_s),
        failure_config=FailureConfig(max_failures=max_failures),
        run_config=RunConfig(name="test", storage_path=str(folder), num_updates=num_updates),
        faults=faults,
    ).fit()


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return train_unsplit(
        gpt(**SIZES),  # type: ignore[arg-type]
        RandomTokens(),
        num_updates=NUM_UPDATES,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        decay_matrices_only=0.01,
        fused=True,
        on=torch.device("cuda", 0),
    ).losses


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "chimera", "amdp-flush"])
def test_twenty_updates_equal_the_unsplit_model(tmp_path: Path, expected: list[float], schedule: str, num_devices: int) -> None:
    result = train(tmp_path, schedule, num_devices)
    assert result.losses == pytest.approx(expected, rel=1e-5)
    assert all(result.plan.topology.device(name).kind != "cpu" for name in result.plan.devices)


def test_an_asynchronous_schedule_trains(tmp_path: Path) -> None:
    losses = train(tmp_path, "amdp", 4, batches=lambda _: SameTokens()).losses
    assert losses[-1] < 0.8 * losses[0]  # on a CPU 0.57, with nothing late


def test_in_bfloat16_losses_are_near(tmp_path: Path, expected: list[float]) -> None:
    assert train(tmp_path, "1f1b", 2, precision=Precision.BF16_MIXED).losses == pytest.approx(expected, rel=2e-3)


@pytest.mark.timeout(300)  # each actor compiles its layers
def test_compiled_layers_do_what_they_do_uncompiled(tmp_path: Path, expected: list[float]) -> None:
    assert train(tmp_path, "zb-h1", 2, compile_layers=True).losses == pytest.approx(expected, rel=1e-4)


def test_a_killed_actor_ends_the_run_at_once_and_is_named(tmp_path: Path) -> None:
    script = FaultScript((Fault(1, "1F2", FaultKind.KILL, window=2),))
    began_s = time.monotonic()
    with pytest.raises(RunError, match=r"device .*/1"):
        train(tmp_path, "1f1b", 2, faults=script, message_timeout_s=120.0)
    assert time.monotonic() - began_s < 100.0, "the peers waited for their messages until time ran out"


def test_a_device_that_hangs_is_named_by_who_waits_for_it(tmp_path: Path) -> None:
    script = FaultScript((Fault(0, "0F3", FaultKind.HANG, window=1),))
    with pytest.raises(RunError, match=r"F3|microbatch 3"):
        train(tmp_path, "1f1b", 2, faults=script, message_timeout_s=5.0)


def test_memory_that_is_not_there_is_told_with_a_remedy(tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info()
    # What is left takes two processes of CUDA, but not 2 GB of weights with their gradients and moments.
    held = torch.empty(free - (6 << 30), dtype=torch.uint8, device="cuda")
    wide = {"num_layers": 2, "d_model": 1024, "num_heads": 4, "sequence_length": 16, "vocabulary_size": 500_000}
    with pytest.raises((RunError, StageFailedError), match=r"(?i)out of memory[\s\S]*memory is full"):
        Trainer(
            "raypipe.models.gpt:gpt",
            model_options=wide,
            batches=rows,
            schedule_config=ScheduleConfig(name="1f1b", num_microbatches=2, microbatch_size=2),
            scaling_config=ScalingConfig(num_devices=2, use_gpu=True, gpus_per_device=min(1.0, torch.cuda.device_count() / 2)),
            run_config=RunConfig(name="test", storage_path=str(tmp_path), num_updates=2),
        ).fit()
    del held
    torch.cuda.empty_cache()


def test_a_spare_process_that_sees_no_gpu_takes_that_of_a_lost_one(
    tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch_spares(monkeypatch)
    found = train(tmp_path, "1f1b", 2, faults=FaultScript((Fault(1, "1F2", FaultKind.KILL, window=2),)), max_failures=1)
    assert found.losses == pytest.approx(expected, rel=1e-5)
    assert watched.taken == [[1]]
