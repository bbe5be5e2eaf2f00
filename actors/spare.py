"""A process that waits to take the place of a lost stage actor.

Ray imports this module at the usual priority, while windows run. What takes seconds to import, such as torch and the stage actor, is
imported inside functions, which run when the processor is idle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np  # noqa: F401  # these two start threads, which keep the priority of the thread that imports them
import pyarrow as pa  # noqa: F401
from ray import cloudpickle

from raypipe.actors.priority import raise_priorities, run_when_idle
from raypipe.errors import FormatError, RunError

if TYPE_CHECKING:
    from raypipe.actors.actor import StageActor
    from raypipe.actors.actor_info import ActorInfo
    from raypipe.actors.cores import NodePosition
    from raypipe.actors.orders import BuildOrder, Identity

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # torch looks for GPUs without starting CUDA, which reads the variable above once


class SpareProcess:
    """Holds a stage actor without a device and without stages, until it takes a device; no GPU is visible to it until then."""

    def __init__(self, run: str, name: str, *, num_threads: int) -> None:
        os.environ.update({VISIBLE_GPUS: "", **_WITHOUT_DRIVER})
        self._run = run
        self._name = name
        self._num_threads = num_threads
        self._actor: StageActor | None = None
        self._urgent = threading.Event()

    def prepare(self, order: bytes, *, when_idle: bool) -> None:
        """Load what stages of a run are built with: the modules of its model, of its data and of its optimizer. Build no layer.

        `order` is a pickled `BuildOrder`. `when_idle` leaves the processor to all who want it, then takes a bounded share of it.
        """
        load = partial(_load, order)
        loaded = run_when_idle(load, urgent=self._urgent) if when_idle else load()
        # From here on in this thread: this starts threads.
        _open_rows(loaded)
        self._actor = _stage_actor(self._run, self._name, num_threads=self._num_threads)

    def hurry(self) -> None:
        """Load at the usual priority from now on, if this process may. Answered while modules are loaded, or before."""
        self._urgent.set()
        with suppress(RunError):
            raise_priorities()

    def take_device(self, identity: Identity, *, gpu_share: float, node_position: NodePosition | None, gpus: str) -> ActorInfo:
        """Become the stage actor of a device, whose GPUs are `gpus`, as CUDA_VISIBLE_DEVICES names them; return where this actor runs.

        Raises:
            RunError: The modules are not loaded, or a thread of this process would compute at a lower priority than others do.
        """
        raise_priorities()
        if gpu_share:
            os.environ[VISIBLE_GPUS] = gpus
        for name in _WITHOUT_DRIVER:
            os.environ.pop(name, None)
        self.actor.use_device(identity, gpu_share, node_position)
        return self.actor.info()

    @property
    def actor(self) -> StageActor:
        """The stage actor; raises `RunError` before the modules are loaded."""
        if self._actor is None:
            raise RunError(f"{self._name} has not loaded the modules of the run")
        return self._actor


def standing_in_for(actor: type[StageActor]) -> type[SpareProcess]:
    """Return the class of spare processes that answer to the methods of `actor`, too; who unpickles it does not import `actor`."""
    methods = {name: _passed_on(name) for name, member in vars(actor).items() if callable(member) and not name.startswith("_")}
    return type(SpareProcess.__name__, (SpareProcess,), methods)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(spare: SpareProcess, *args: Any, **kwargs: Any) -> Any:
        return getattr(spare.actor, name)(*args, **kwargs)

    return method


def _load(pickled: bytes) -> BuildOrder:
    import pyarrow.dataset  # noqa: F401, PLC0415  # else imported when the first file is read

    import raypipe.actors.actor  # noqa: F401, PLC0415
    from raypipe.actors.stage.optimizers import check_optimizer  # noqa: PLC0415

    order = cast("BuildOrder", cloudpickle.loads(pickled))
    order.model()
    check_optimizer(order.optimizer, function=order.optimizer_function)
    return order


def _open_rows(order: BuildOrder) -> None:
    from raypipe.actors.execution.batches import FileSource  # noqa: PLC0415

    if isinstance(order.batches, FileSource):  # rows of a user's function may take all memory
        with suppress(FormatError):  # this node may not have the file
            order.batches("train")


def _stage_actor(run: str, name: str, *, num_threads: int) -> StageActor:
    from raypipe.actors.actor import StageActor  # noqa: PLC0415
    from raypipe.actors.orders import Identity  # noqa: PLC0415

    return StageActor(Identity(run, device=-1, name=name, stages=()), num_threads=num_threads)
