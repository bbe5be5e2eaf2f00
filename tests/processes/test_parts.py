"""Messages of parts of microbatches and of whole ones, through the channels of processes; each device is a thread."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.transport import shm
from raypipe.artifacts.cut import Cut
from raypipe.models.towers import two_towers
from raypipe.schedules.lower import Placement
from raypipe.schedules.passes import recompute
from raypipe.schedules.validate import validate
from tests.actors.oracles import RandomRows, largest_difference, layers_of, train_unsplit
from tests.processes.fake_nccl import FakeNccl, Network
from tests.processes.process_ends import Make, all_channels
from tests.processes.transport_contract import together
from tests.schedules.handwritten import divided, two_branches

NEEDS_SHM = pytest.mark.skipif(not shm.available(), reason="needs memfd_create, which Linux has")


@pytest.mark.parametrize("replicated", [False, True], ids=["one-device-each", "replicas"])
@pytest.mark.parametrize(
    ("shared", "nccl", "over_tcp"),
    [
        pytest.param(False, False, True, id="tcp"),
        pytest.param(False, False, False, id="gloo"),
        pytest.param(True, False, False, marks=NEEDS_SHM, id="shared-memory"),
        pytest.param(False, True, False, id="nccl"),
        pytest.param(True, True, False, id="within-a-gpu"),
    ],
)
def test_branches_in_parts_before_a_whole_loss_equal_the_unsplit_model(
    make: Make, shared: bool, nccl: bool, over_tcp: bool, replicated: bool
) -> None:
    model, batches = two_towers(dtype="float64"), RandomRows(fields=("left", "right", "targets"))
    cut = Cut(((0,), (3,), (1, 2), (4, 5), (6,)), model.edges())
    schedule = replace(recompute(divided(two_branches(num_updates=2), dict.fromkeys(range(4), 3)), (0, 1, 2)), graph=cut.graph)
    validate(schedule)
    numbers = iter(range(5))
    shares = ((0.5, 0.5), (0.5, 0.5), (1.0,)) if replicated else ((1.0,),) * 3
    run = LocalPipeline(
        model,
        cut=cut,
        schedule=schedule,
        batches=batches,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        learning_rate=lambda _: 1e-2,
        max_grad_norm=0.5,
        placement=Placement(tuple(tuple((next(numbers), share) for share in worker) for worker in shares)),
    )
    num_devices = len(run.executors)
    settings: dict[str, Any] = {
        "names": tuple(f"device-{device}" for device in range(num_devices)),
        "groups": [tuple(range(num_devices)), *([(0, 1), (2, 3)] if replicated else [])],
        "shared": all_channels(num_devices) if shared else [],
        "over_tcp": over_tcp,
        "connect_timeout_s": 20.0,
    }
    network = Network()
    libraries = [{"library": FakeNccl(network)} if nccl else {} for _ in range(num_devices)]
    ends = [make(device, num_devices, **settings, **library) for device, library in enumerate(libraries)]
    together(*(end.connect for end in ends))
    for executor, end in zip(run.executors, ends, strict=True):
        executor.transport = end
    losses = [loss for _ in range(2) for loss in mean_losses(run.run_window(), num_microbatches=4)]
    expected = train_unsplit(model, batches, num_updates=4, num_microbatches=4, learning_rate=1e-2, max_grad_norm=0.5)
    assert losses == pytest.approx(expected.losses, abs=1e-10)
    for index, copies in layers_of(run).items():
        assert all(largest_difference(copy, expected.layers[index]) < 1e-10 for copy in copies)
