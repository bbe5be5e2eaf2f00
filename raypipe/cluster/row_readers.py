"""The processes of a run that read the user's data, beside the stage actors."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.data.reader import NewestPosition, RowReader
from raypipe.actors.data.served import Readers
from raypipe.actors.data.source import DataSource
from raypipe.config import TrainConfig
from raypipe.data.samples import Split
from raypipe.errors import RaypipeError, RunError

_MOST_SENT_ALONG = 64 << 10  # bytes of the data that a reader is started with
_MOST_CALLS = 64  # that a reader answers at once: those of all stages, most of them waiting


class RowReaders:
    """Reads the rows of each split in processes of their own, which end with the `with` block.

    They run on the driver's node while it has room, and start again where one is lost: a stream from its newest saved position.

    Args:
        is_stream: Whether the training rows can only be read one after the other, by one process.
        config: Sizes of microbatches and updates, and how many processes read ahead.
        start: Position of the training stream.
    """

    def __init__(self, source: DataSource, *, is_stream: bool, config: TrainConfig, start: str = "") -> None:
        schedule, data = config.schedule, config.data
        self._is_stream = is_stream
        self._prefetch, self._timeout_s = data.prefetch, config.cluster.message_timeout_s
        # Kept, since a reader that starts again takes it once more. Ray warns of what it must fetch for that: small data goes along.
        content = source.packed()
        packed = self._packed = content if len(content) <= _MOST_SENT_ALONG else ray.put(content)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = {"num_cpus": 0, "max_concurrency": _MOST_CALLS, "max_restarts": -1, "max_task_retries": -1}
        make = ray.remote(RowReader).options(scheduling_strategy=here, **options).remote
        # The last stage asks for a microbatch when the first is at most an update, or a microbatch for each device, ahead.
        num_kept = 2 * (schedule.num_microbatches + config.scaling.num_devices + data.prefetch)
        mark_every = schedule.num_microbatches * schedule.microbatch_size
        newest = ray.remote(NewestPosition).options(scheduling_strategy=here, num_cpus=0, max_restarts=-1).remote
        self._newest = newest(start) if is_stream else None
        handles: dict[str, tuple[Any, ...]] = {}
        for split in source.data:
            is_train = split == Split.TRAIN
            count = data.num_readers if is_train and not is_stream else 1
            begin = partial(_begin, self._newest, start, timeout_s=self._timeout_s) if is_train and is_stream else str
            handles[split] = tuple(make(packed, split, num_kept=num_kept, mark_every=mark_every, start=begin) for _ in range(count))
        self._handles = handles

    def __enter__(self) -> RowReaders:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handles in self._handles.values():
            for handle in handles:
                ray.kill(handle)
        if self._newest is not None:
            ray.kill(self._newest)

    def batches(self, microbatch_size: int) -> Readers:
        """Return how actors get their rows."""
        return Readers(self._handles, microbatch_size=microbatch_size, prefetch=self._prefetch, timeout_s=self._timeout_s)

    def position(self, row: int) -> str | None:
        """Return from where the training stream goes on at a row, as text for a checkpoint; `None` for rows read by number.

        Raises:
            RunError: The reader does not answer.
        """
        if not self._is_stream:
            return None
        try:
            found = str(ray.get(self._handles[Split.TRAIN][0].position.remote(row), timeout=self._timeout_s))
        except RayTaskError as error:
            raise (
                error.cause if isinstance(error.cause, RaypipeError) else RunError(f"asking for the position of the data: {error}")
            ) from error
        except (GetTimeoutError, RayError) as error:
            raise RunError(f"the process that reads the data does not answer: {error}") from error
        if self._newest is not None:
            self._newest.put.remote(found)
        return found


def _begin(newest: Any, start: str, *, timeout_s: float) -> str:
    """Return the newest saved position; where its keeper is lost, that from which the run began."""
    try:
        return str(ray.get(newest.get.remote(), timeout=timeout_s))
    except (GetTimeoutError, RayError):
        return start
