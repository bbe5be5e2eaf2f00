"""A spare process: what it loads, and how it becomes the actor of a device."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from ray import cloudpickle

from raypipe.actors.actor import StageActor
from raypipe.actors.execution.batches import FileSource
from raypipe.actors.orders import BuildOrder, Identity
from raypipe.actors.spare import VISIBLE_GPUS, SpareProcess, standing_in_for
from raypipe.data.prepare import prepare
from raypipe.errors import RunError
from raypipe.models.mlp import mlp
from tests.spares import spare_order

MODULE = """
import os, threading

from raypipe.models.mlp import mlp

policy = os.sched_getscheduler(0)
threading.Thread(target=threading.Event().wait, name="of a module", daemon=True).start()

def model():
    return mlp(num_layers=2)
"""
"""A model's module that notes by which policy it is loaded, and starts a thread."""

IN_PROCESS = """
import json, os, pickle, sys
from functools import partial
from pathlib import Path

os.SCHED_IDLE = os.SCHED_BATCH  # threads inherit it all the same, and a busy machine has time for it

def policies():
    # Behind the name in brackets, field 41 of proc(5).
    return [int((task / "stat").read_text().rpartition(")")[2].split()[38]) for task in Path("/proc/self/task").iterdir()]

spare_class, order, identity = pickle.loads(sys.stdin.buffer.read())
found = {"early": sorted({"torch", "raypipe.actors.actor"} & sys.modules.keys())}
import raypipe.actors.spare as module
load = module._load
module.run_when_idle = partial(module.run_when_idle, idle_s=60.0)  # however long a busy machine takes

def load_and_note(pickled):
    order = load(pickled)
    found["loaded"] = list(sys.modules)
    return order

module._load = load_and_note
spare = spare_class("run", "spare process 1 on node0", num_threads=1)
spare.prepare(order, when_idle=True)
late = sys.modules.keys() - found.pop("loaded")
found["late"] = sorted(name for name in late if name.partition(".")[0] not in sys.stdlib_module_names)
found["module"] = sys.modules["noting"].policy
found["before"] = policies()
from raypipe.actors.actor import StageActor
StageActor.info = lambda actor: None  # which asks Ray
spare.take_device(pickle.loads(identity), gpu_share=0.0, node_position=None, gpus="")
found["behind"] = policies()
found["device"] = spare.status().device
print(json.dumps(found))
"""


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> SpareProcess:
    """Return a spare process that has loaded what it needs, and of which Ray does not know."""
    for name in (VISIBLE_GPUS, "PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MAX_CTAS", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.setenv(name, "before")  # and put back behind the test
    monkeypatch.setattr(StageActor, "info", lambda actor: SimpleNamespace(on=actor._on))
    spare = SpareProcess("run", "spare process 1 on node0", num_threads=torch.get_num_threads())
    spare.prepare(spare_order(mlp), when_idle=False)
    return spare


def test_it_sees_no_gpu_until_it_takes_that_of_a_device(spare: SpareProcess) -> None:
    assert os.environ[VISIBLE_GPUS] == ""
    info = spare.take_device(Identity("run", 2, "node0/2", ()), gpu_share=1.0, node_position=None, gpus="5")
    assert (os.environ[VISIBLE_GPUS], info.on) == ("5", torch.device("cuda", 0))  # type: ignore[attr-defined]
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def test_it_becomes_the_actor_of_a_cpu_slot(spare: SpareProcess) -> None:
    identity = Identity("run", 2, "node0/2", ())
    info = spare.take_device(identity, gpu_share=0.0, node_position=None, gpus="")
    assert (info.on, spare.actor.status().device, spare.actor.status().name) == (torch.device("cpu"), 2, "node0/2")  # type: ignore[attr-defined]


def test_it_takes_no_device_before_its_modules_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_GPUS, "before")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "before")
    spare = SpareProcess("run", "spare process 1 on node0", num_threads=1)
    with pytest.raises(RunError, match="has not loaded"):
        spare.take_device(Identity("run", 2, "node0/2", ()), gpu_share=0.0, node_position=None, gpus="")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a policy of their own on Linux")
@pytest.mark.skipif(os.getuid() != 0, reason="this user may give no thread a higher priority")
def test_loading_goes_on_at_the_usual_priority_when_it_is_hurried(spare: SpareProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[int] = []

    def load(pickled: bytes) -> BuildOrder:
        policies.append(os.sched_getscheduler(0))
        with ThreadPoolExecutor(1) as another:  # as Ray calls it
            another.submit(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0)).result()
            another.submit(spare.hurry).result()
        policies.append(os.sched_getscheduler(0))
        return cast("BuildOrder", cloudpickle.loads(pickled))

    monkeypatch.setattr("raypipe.actors.spare._load", load)
    spare.prepare(spare_order(mlp), when_idle=True)
    assert policies == [os.SCHED_IDLE, os.SCHED_OTHER]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a policy of their own on Linux")
@pytest.mark.skipif(os.getuid() != 0, reason="this user may give no thread a higher priority")
def test_modules_are_loaded_at_the_lowest_priority_and_no_thread_computes_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noting.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("noting").model
    (tmp_path / "text").write_text("a text of some lines\n" * 1000)
    prepare(tmp_path / "text", output=tmp_path / "tokens.parquet")
    rows = FileSource(str(tmp_path / "tokens.parquet"), sequence_length=8, seed=0, microbatch_size=1)
    sent = cloudpickle.dumps((standing_in_for(StageActor), spare_order(model, rows), cloudpickle.dumps(Identity("run", 2, "node0/2", ()))))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", IN_PROCESS], input=sent, env=environment, capture_output=True, check=True, timeout=60.0)
    found = json.loads(ended.stdout)
    assert b"init callback" not in ended.stderr  # of the profiler, started in another thread than torch was loaded in
    assert found["early"] == []
    assert found["module"] == os.SCHED_BATCH
    assert found["late"] == []
    assert found["before"].count(os.SCHED_BATCH) == 1  # the model's own thread: raypipe leaves none, since not every user may change it
    assert set(found["behind"]) == {os.SCHED_OTHER}
    assert found["device"] == 2
