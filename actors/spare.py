"""A process that waits to take the place of a lost stage actor."""

from __future__ import annotations

import os
from contextlib import suppress

from raypipe.actors.actor import StageActor
from raypipe.actors.actor_info import ActorInfo
from raypipe.actors.cores import NodePosition
from raypipe.actors.execution.batches import FileSource
from raypipe.actors.orders import BuildOrder, Identity
from raypipe.actors.stage.optimizers import check_optimizer
from raypipe.errors import FormatError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # torch looks for GPUs without starting CUDA, which reads the variable above once


class SpareProcess(StageActor):
    """A stage actor without a device and without stages, until it takes a device; no GPU is visible to it until then."""

    def __init__(self, run: str, name: str, *, num_threads: int) -> None:
        os.environ.update({VISIBLE_GPUS: "", **_WITHOUT_DRIVER})
        super().__init__(Identity(run, device=-1, name=name, stages=()), num_threads=num_threads)

    def prepare(self, order: BuildOrder) -> None:
        """Load what stages of a run are built with: the modules of its model, of its data and of its optimizer. Build no layer."""
        order.model()
        check_optimizer(order.optimizer, function=order.optimizer_function)
        if isinstance(order.batches, FileSource):  # rows of a user's function may take all memory
            with suppress(FormatError):  # this node may not have the file
                order.batches("train")

    def take_device(self, identity: Identity, *, gpu_share: float, node_position: NodePosition | None, gpus: str) -> ActorInfo:
        """Become the stage actor of a device, whose GPUs are `gpus`, as CUDA_VISIBLE_DEVICES names them; return where this actor runs."""
        if gpu_share:
            os.environ[VISIBLE_GPUS] = gpus
        for name in _WITHOUT_DRIVER:
            os.environ.pop(name, None)
        self._use_device(identity, gpu_share, node_position)
        return self.info()
