"""The stages that one device holds: how they are built, saved, loaded and handed to other devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from raypipe.actors.execution.batches import WHOLE, BatchSource
from raypipe.actors.orders import BuildOrder, LayerSize
from raypipe.actors.stage.checkpoint import load_stages
from raypipe.actors.stage.gradient_flow import LayerOutput
from raypipe.actors.stage.named_weights import full_names
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.precision import build_stage, loss_in_float32, prepare
from raypipe.actors.stage.snapshot import Snapshot
from raypipe.actors.stage.state import export_layers, export_stepped, import_layers
from raypipe.actors.stage.weights import Optimizer, Weights
from raypipe.artifacts.checkpoint_files import FileSums
from raypipe.artifacts.storage import Storage
from raypipe.model import Batch


class DeviceStages:
    """The stages of one device, their weights and the rows that they read."""

    def __init__(self, order: BuildOrder, stages: Sequence[int], *, on: torch.device) -> None:
        self.order = order
        self.model = loss_in_float32(order.model(), order.precision)
        self.weights: dict[int, Weights] = {}
        self.optimizers: dict[int, Optimizer] = {}
        """What has made the optimizer of each stage."""
        self.primary: frozenset[int] = frozenset()
        """Stages whose first copy is on this device; only it saves and exports them."""
        self._snapshot = Snapshot()
        self._stages = stages
        self._on = on
        self._sources: dict[str, BatchSource] = {}
        indices = {index for stage in stages for index in order.cut.stages[stage]}
        # The loss is taken behind the last layer.
        self._reads_rows = len(self.model.layers) - 1 in indices or any(self.model.layers[index].takes_batch for index in indices)

    def rows(self, split: str) -> BatchSource | None:
        """Return the rows of a split; `None` where the stages read none, because the file may be missing on this node."""
        if not self._reads_rows:
            return None
        if split not in self._sources:
            self._sources[split] = self.order.batches(split)
        return self._sources[split]

    def sample(self) -> Batch:
        """Return the first microbatch, as far as the stages read it."""
        rows = self.rows("train")
        return {} if rows is None else rows.batch(0, WHOLE)

    def build(self) -> dict[int, LayerSize]:
        """Build the stages; return the size of each layer."""
        order = self.order
        for stage in self._stages:
            make: Optimizer = partial(build_optimizer, order.optimizer, function=order.optimizer_function)
            if order.make_optimizer:
                make = partial(order.make_optimizer, stage)
            self.optimizers[stage] = make
            self.weights[stage] = build_stage(
                self.model,
                order.cut,
                stage,
                optimizer=make,
                rule=order.weight_rule,
                seed=order.seed,
                precision=order.precision,
                on=self._on,
            )
        return {index: size for weights in self.weights.values() for index, size in _layer_sizes(weights).items()}

    def output_specs(self, stage: int, made: Mapping[int, tuple[LayerOutput, ...]]) -> dict[int, tuple[LayerOutput, ...]]:
        """Return what a stage gives, from what the stages before it give; prepare its weights for the precision of the run."""
        weights = self.weights[stage]
        batch = self.sample() if weights.module.takes_batch else {}
        if batch:
            self.model.check_fields(batch, where="a batch")
        return prepare(weights, made, batch, num_rows=self.order.num_rows)

    # Layers on disk

    def take_snapshot(self, stepped: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Copy weights and optimizer state of the primary stages into memory; the copy before must have been written.

        `stepped` is what other copies have of the optimizer's state, by layer.
        """
        self._snapshot.take(self._primary(), stepped)

    def write_snapshot(self, folder: Storage) -> dict[str, FileSums]:
        """Write the copy into a folder while windows run; return the sums of each layer's file."""
        return self._snapshot.write(folder)

    def load(self, folder: Storage) -> None:
        """Read what was written from any cut of the model."""
        load_stages(folder, self.weights.values())

    # Layers that move between devices

    def _primary(self) -> list[Weights]:
        return [weights for stage, weights in self.weights.items() if stage in self.primary]

    def exported_layers(self) -> tuple[list[int], list[int]]:
        """Return the layers that this device exports whole, and those of which it, not the first copy, has stepped a part."""
        stepped = [layer for stage, weights in self.weights.items() if stage not in self.primary for layer in export_stepped(weights)]
        return [index for weights in self._primary() for index in weights.module.indices], stepped

    def nonfinite_layers(self) -> list[tuple[int, int, str]]:
        """Return index, stage and name of each layer with a weight that is infinite or no number."""
        return [
            (index, stage, weights.module.names[index])
            for stage, weights in self.weights.items()
            for index in weights.module.indices
            if not all(bool(torch.isfinite(weight).all()) for weight in weights.module.layers[str(index)].parameters())
        ]

    def needed_layers(self) -> list[int]:
        """Return the layers whose states the stages need."""
        return list(dict.fromkeys(layer for weights in self.weights.values() for layer in weights.module.needed_layers))

    def export_layers(self, layers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Yield what this device has to export of each of `exported_layers`."""
        for layer in layers:
            stage, weights = next((stage, weights) for stage, weights in self.weights.items() if layer in weights.module.indices)
            yield (export_layers if stage in self.primary else export_stepped)(weights)[layer]

    def import_layers(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take over the states of `needed_layers`, by layer, as `export_layers` yielded them."""
        for weights in self.weights.values():
            import_layers(weights, states)


def _layer_sizes(weights: Weights) -> dict[int, LayerSize]:
    module, names = weights.module, full_names(weights.module, weights.names)
    counted = {id(module.get_parameter(name)) for name in module.borrowed}
    sizes: dict[int, LayerSize] = {}
    for index, layer in module.layers.items():
        parameters = list(layer.parameters())
        num_parameters = sum(parameter.numel() for parameter in parameters if id(parameter) not in counted)
        trained = tuple(full for name, full in names.items() if name.split(".", 2)[1] == index)
        sizes[int(index)] = LayerSize(num_parameters, sum(parameter.nbytes for parameter in parameters), trained)
        counted.update(map(id, parameters))
    return sizes
