"""The weights of one stage as the executor sees them: versions to compute with, gradient buffers to fill, and updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from raypipe.actors.stage.gradients import GradientBuffers, squared_norm
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import Outputs, StageModule
from raypipe.actors.stage.ties import SharedGradients
from raypipe.actors.stage.versions import WeightVersions
from raypipe.model import Batch
from raypipe.schedules.ir import WeightRule

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of one stage from its weights."""


class Weights:
    """The weights of one stage, their gradients and their optimizer.

    Args:
        module: Layers of the stage.
        optimizer: Makes the optimizer.
        rule: How a backward finds its weights.

    Attributes:
        names: Names of the trained parameters in the module.
        masters: Tensors that the optimizer steps, in the order of `names`.
    """

    def __init__(self, module: StageModule, *, optimizer: Optimizer, rule: WeightRule) -> None:
        self.module = module
        self.on = module.on
        self.rule = rule
        self._versions = WeightVersions(module, separate=rule.keeps_versions)
        self.names, self.masters = self._versions.names, self._versions.masters
        self._gradients = GradientBuffers(self.masters, on=self.on)
        self._shared = SharedGradients(module.shared, self.names, self.masters, on=self.on)
        self.optimizer = optimizer(self.masters) if self.masters else None

    # Versions

    @property
    def newest(self) -> int:
        """Number of the newest version in the window."""
        return self._versions.newest

    @property
    def num_versions(self) -> int:
        """Number of copies of the weights that are held now."""
        return self._versions.num_versions

    @property
    def low_precision_bytes(self) -> int:
        """Bytes of one version's copies in lower precision."""
        return self._versions.low_precision_bytes

    def lower(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Compute with copies of these weights in another precision from now on. Between windows only."""
        self._versions.lower(names, dtype)

    def masters_changed(self) -> None:
        """Make what the masters hold the newest version, under its number. Between windows only."""
        assert self.num_versions == 1, "weights are replaced between windows only"
        self._versions.set_newest(self.newest)

    def check_in_place(self) -> None:
        """Check that layers compute with the tensors that updates write.

        Raises:
            ConfigError: A layer has put other memory in a weight's place.
        """
        self._versions.check_in_place()

    def begin_window(self) -> None:
        """Number versions from 0 again, beginning with the newest."""
        self._versions.begin_window()
        self._gradients.begin_window()

    def end_window(self) -> None:
        """Keep the newest version alone and make it the module's parameters, for evaluation and checkpoints."""
        self._versions.end_window()
        self._gradients.end_window(stage=self.module.stage)

    def release(self, version: int) -> None:
        """Drop a version after its last reader, unless it is the newest."""
        if version != self.newest:
            self._drop(version)

    def _drop(self, version: int) -> None:
        if self._versions.separate:
            if self._gradients.bound_version == version:
                self._gradients.unbind()
            self._versions.drop(version)

    # Computation

    def run(self, version: int, inputs: Outputs, batch: Batch, rng_key: RngKey) -> Outputs:
        """Return the outputs of the stage's forward with one version of its weights."""
        if not self._versions.separate:
            return self.module.forward(inputs, batch, rng_key)  # nobody hooks into a stage's module: calling it would only take time
        outputs: Outputs = torch.func.functional_call(self.module, self._versions.by_name(version), (inputs, batch, rng_key))
        return outputs

    def parameters(self, version: int) -> Sequence[Tensor]:
        """Return the tensors that a forward with this version computes with."""
        return self._versions.tensors(version)

    def bind(self, version: int, update: int) -> Sequence[Tensor]:
        """Make the `.grad` of a version's tensors the gradient buffer of an update, and return these tensors."""
        leaves = self._versions.tensors(version)
        self._gradients.bind(update, version if self._versions.separate else 0, leaves)
        return leaves

    # Gradients

    def gradients(self, update: int) -> list[Tensor | None]:
        """Return the gradient buffer of an update, in the order of `names`."""
        return self._gradients.of(update)

    def flat_gradients(self, update: int) -> Tensor:
        """Return the gradient buffer of an update as a vector, for a sum over replicas; see `FlatLayout`."""
        return self._gradients.flatten(update)

    def set_flat_gradients(self, update: int, vector: Tensor) -> None:
        """Replace the gradient buffer of an update by the sum of the replicas' vectors."""
        self._gradients.set_flat(update, vector)

    def drop_gradients(self, update: int) -> None:
        """Drop the gradient buffer of an update."""
        self._gradients.pop(update)

    def squared_norm(self, update: int) -> Tensor:
        """Return the sum of the squares of an update's gradients, in float64, without those of weights shared with other stages."""
        gradients = self.gradients(update)
        return squared_norm([gradient for at in self._shared.unshared if (gradient := gradients[at]) is not None], on=self.on)

    def shared_gradients(self, update: int) -> Tensor:
        """Return the gradients of all weights that the stages of its tie share as a vector, for a sum over these stages."""
        return self._shared.pack(self.gradients(update))

    def shared_squared_norm(self, vector: Tensor) -> Tensor:
        """Return the sum of the squares of the gradients in a sum of the stages' vectors, in float64."""
        return self._shared.squared_norm(vector)

    # Updates

    def update(self, update: int, *, scale: float | Tensor, learning_rate: float, keep_old: bool, shared: Tensor | None = None) -> None:
        """Make version `update + 1` from version `update`.

        Args:
            update: Number of the update in the window; its gradients are used up.
            scale: Factor of the gradients, for clipping.
            learning_rate: Learning rate of this update.
            keep_old: Whether version `update` is still to be read.
            shared: Clipped sum of the vectors of all stages of its tie, in place of this stage's own gradients of shared weights.
        """
        gradients = self._gradients.pop(update)
        if shared is not None:
            self._shared.unpack(shared, gradients)
        if keep_old:
            self._versions.move_masters()
        self._step(gradients, scale=scale, learning_rate=learning_rate)
        self._versions.set_newest(update + 1)
        if not keep_old:
            self._drop(update)

    def _step(self, gradients: list[Tensor | None], *, scale: float | Tensor, learning_rate: float) -> None:
        if self.optimizer is None:
            return
        # The host does not know whether a scale that the device computes is 1.
        for at in self._shared.unshared if isinstance(scale, Tensor) or scale != 1.0 else ():
            if (gradient := gradients[at]) is not None:
                gradient.mul_(scale)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    def flat(self) -> Tensor:
        """Return the newest weights as one vector."""
        parts = [master.detach().reshape(-1) for master in self.masters]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.on)

    def receive(self, update: int, vector: Tensor) -> None:
        """Take version `update + 1` from the replica that made it, as `flat` gave it there, and drop this replica's gradients."""
        self.drop_gradients(update)
        self._versions.move_masters()
        with torch.no_grad():
            for part, master in zip(torch.split(vector, [master.numel() for master in self.masters]), self.masters, strict=True):
                master.copy_(part.view_as(master))
        self._versions.set_newest(update + 1)
