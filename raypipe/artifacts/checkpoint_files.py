"""The files of checkpoints: a folder with one file per layer, so that any cut of the model can load what any other saved.

checkpoints/update-000200/
checkpoint.json              `raypipe.checkpoint/1`; written last: a folder without it is never read
layer-0000-embedding.safetensors
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import field

from raypipe.artifacts import codec
from raypipe.artifacts.record import record
from raypipe.artifacts.storage import Storage

FORMAT = "raypipe.checkpoint/1"
INDEX = "checkpoint.json"
FOLDER = "checkpoints"


@record()
class FileSums:
    """Size of a file of tensors and the CRC-32 of its header and of each tensor, in hexadecimal digits."""

    size_bytes: int
    header: str
    tensors: dict[str, str]


@record()
class CheckpointIndex:
    """What a checkpoint is of, and what must be in it.

    The number of an update says which rows it reads and seeds its dropout, and with the configuration its learning rate, so that a run
    goes on with the very next row.

    Attributes:
        update: Updates done.
        layers: Names of the layers in order.
        model: Name of the model function.
        seed: Seed of the run.
        rows_per_update: Rows that an update reads; 0 in checkpoints of before it was written down.
        optimizer: Name of the optimizer that the state is of; empty where it was not written down.
        metrics: Training loss of the last update, and the validation loss if the weights were evaluated.
        data: Where a stream of training rows goes on; left out for rows that are read by number.
        files: Size and checksums of each file; empty in checkpoints of before they were taken.
        digest: Digest of all of the above, by which an altered index is known.
    """

    update: int
    layers: tuple[str, ...]
    model: str
    seed: int
    rows_per_update: int = 0
    optimizer: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    data: str | None = None  # left out of files, so that digests of before stay
    files: dict[str, FileSums] = field(default_factory=dict)
    digest: str = ""

    def sealed(self) -> CheckpointIndex:
        """Return the index with its digest."""
        return dataclasses.replace(self, digest=codec.digest(dataclasses.replace(self, digest=""), format_name=FORMAT))


def layer_file(index: int, name: str) -> str:
    """Return the name of a layer's file."""
    return f"layer-{index:04d}-{name}.safetensors"


def checkpoint_name(update: int) -> str:
    """Return the name of the folder of the checkpoint after an update."""
    return f"update-{update:06d}"


def finished_folders(run: Storage) -> list[Storage]:
    """Return the folders in a run's folder that have the index of a checkpoint."""
    return [folder for folder in (run / FOLDER).folders() if folder.size(INDEX) is not None]


def remove_checkpoint(folder: Storage) -> None:
    """Remove a checkpoint, its index first, so that a half of it never passes for a checkpoint; raises `OSError`."""
    if folder.size(INDEX) is not None:
        folder.remove(INDEX)
        folder.sync()
    with contextlib.suppress(FileNotFoundError):
        folder.remove_all()
