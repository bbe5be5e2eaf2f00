"""A copy of a device's layers in memory, from which a checkpoint is written while the next window runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from raypipe.actors.stage.state import export_layers
from raypipe.actors.stage.tensor_file import write_tensors
from raypipe.actors.stage.weights import Weights
from raypipe.artifacts.checkpoint_files import FileSums, layer_file
from raypipe.artifacts.storage import Storage
from raypipe.errors import NonFiniteError, RunError


class Snapshot:
    """Weights and optimizer state of layers as they were at the end of a window.

    The memory of one copy is kept for the next: taking it anew from the system would take longer than copying.
    """

    def __init__(self) -> None:
        self._layers: dict[int, dict[str, Tensor]] = {}
        self._names: dict[int, str] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for tensors in self._layers.values() for tensor in tensors.values())

    def take(self, stages: Iterable[Weights], stepped: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})) -> None:
        """Copy the layers of stages into memory; what was copied before is gone. Between windows, and not while `write` runs.

        `stepped` is what other copies of the stages have of the optimizer's state, by layer (`export_stepped`).
        """
        layers: dict[int, dict[str, Tensor]] = {}
        for weights in stages:
            for index, own in export_layers(weights).items():
                tensors = {**own, **stepped.get(index, {})}
                before = self._layers.get(index, {})
                layers[index] = {name: _copied(tensor, before.get(name)) for name, tensor in tensors.items()}
                self._names[index] = weights.module.names[index]
        self._layers = layers

    def write(self, folder: Storage) -> dict[str, FileSums]:
        """Write the copy into a folder, a file for each layer, onto the disk; return the sums of each.

        Raises:
            NonFiniteError: A number is infinite or NaN.
            RunError: The folder cannot be written.
        """
        sums: dict[str, FileSums] = {}
        for index, tensors in self._layers.items():
            sums |= write_layer(folder, index, self._names[index], tensors)
        try:
            folder.sync()
        except OSError as error:
            raise RunError(f"{folder.name} cannot be written on node {os.uname().nodename}: {error}") from None
        return sums


def write_layer(folder: Storage, index: int, name: str, tensors: Mapping[str, Tensor]) -> dict[str, FileSums]:
    """Write the state of one layer, on the CPU, into its file; return its sums by the name of the file. Raises as `Snapshot.write`."""
    file = layer_file(index, name)
    for key, tensor in tensors.items():
        if not _is_finite(tensor):
            raise NonFiniteError(f"{key} in {file} is infinite or no number; nothing was saved")
    try:
        with folder.writing(file) as stream:
            return {file: write_tensors(stream.write, tensors, metadata={"layer": str(index)})}
    except (OSError, ValueError) as error:
        raise RunError(f"{folder.name}/{file} cannot be written on node {os.uname().nodename}: {error}") from None


def _is_finite(tensor: Tensor) -> bool:
    # Numbers of one byte know no infinity that torch could tell.
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return True
    # The sum reads the tensor once. It may overflow where all numbers are finite, and is finite only if they are.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _copied(tensor: Tensor, into: Tensor | None) -> Tensor:
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    with torch.no_grad():
        return into.copy_(tensor)


def save_stages(
    folder: str | os.PathLike[str] | Storage, stages: Iterable[Weights], stepped: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})
) -> dict[str, FileSums]:
    """Write the layers of stages, as `Snapshot.take` copies them, into a folder; return the sums of each file, or raise its errors."""
    snapshot = Snapshot()
    snapshot.take(stages, stepped)
    return snapshot.write(folder if isinstance(folder, Storage) else Storage.at(folder))
