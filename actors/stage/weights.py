"""The weights of one stage as the executor sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raypipe.actors.stage.gradients import WHOLE, Bucket, GradientBuffers, squared_norm
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.lookups import Lookups
from raypipe.actors.stage.module import Outputs, StageModule
from raypipe.actors.stage.ties import SharedGradients
from raypipe.actors.stage.versions import WeightVersions
from raypipe.model import Batch
from raypipe.schedules.ir import WeightRule

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of one stage from its weights."""


class Weights:
    """The weights of one stage, their gradients and optimizer."""

    def __init__(self, module: StageModule, *, optimizer: Optimizer, rule: WeightRule) -> None:
        self.module = module
        self.on = module.on
        self.rule = rule
        self.versions = WeightVersions(module, separate=rule.keeps_versions)
        self.names, self.masters = self.versions.names, self.versions.masters
        layers = [int(name.split(".", 2)[1]) for name in self.names]
        self.gradients = GradientBuffers(self.masters, on=self.on, layers=layers)
        self.lookups = Lookups(module, self.names, self.masters)
        self.shared = SharedGradients(module.shared, self.names, self.masters, on=self.on)
        self.optimizer = optimizer(self.masters) if self.masters else None

    def begin_window(self) -> None:
        """Make the newest version number 0."""
        self.versions.begin_window()
        self.gradients.begin_window()

    def end_window(self) -> None:
        """Keep only the newest version and put it into the module."""
        self.versions.end_window()
        self.gradients.end_window(stage=self.module.stage)

    def release(self, version: int) -> None:
        """Drop a version after its last reader, unless it is the newest."""
        if version != self.versions.newest:
            self._drop(version)

    def _drop(self, version: int) -> None:
        if self.versions.separate:
            if self.gradients.bound_version == version:
                self.gradients.unbind()
            self.versions.drop(version)

    def run(self, version: int, inputs: Outputs, batch: Batch, rng_key: RngKey) -> Outputs:
        """Return the stage's outputs with one version of its weights."""
        if not self.versions.separate:
            return self.module.forward(inputs, batch, rng_key)  # nobody hooks into a stage's module: calling it would only take time
        outputs: Outputs = torch.func.functional_call(self.module, self.versions.by_name(version), (inputs, batch, rng_key))
        return outputs

    def bind(self, version: int, update: int) -> Sequence[Tensor]:
        """Make the `.grad` of a version's tensors an update's gradient buffer, and return these tensors."""
        leaves = self.versions.tensors(version)
        self.gradients.bind(update, version if self.versions.separate else 0, leaves)
        return leaves

    def squared_norm(self, update: int) -> Tensor:
        """Return the sum of squares of an update's unshared gradients, in float64."""
        gradients = self.gradients.of(update)
        return squared_norm([gradient for at in self.shared.unshared if (gradient := gradients[at]) is not None], on=self.on)

    @contextmanager
    def when_complete(self, version: int, buckets: Sequence[Bucket], act: Callable[[Bucket], None]) -> Iterator[None]:
        """Act on each bucket, in order, as soon as a backward has added to all gradients of it and of those before it.

        A bucket with a weight that this backward leaves alone is not acted on, nor are those behind it.
        """
        leaves = self.versions.tensors(version)
        missing = [len(members) for members in map(self.gradients.members, buckets)]
        waiting = list(buckets)

        def added(number: int) -> None:
            missing[number] -= 1
            while waiting and not missing[len(buckets) - len(waiting)]:
                act(waiting.pop(0))

        hooks = [
            leaves[at].register_post_accumulate_grad_hook(lambda _, number=number: added(number))  # type: ignore[no-untyped-call]
            for number, bucket in enumerate(buckets)
            for at in self.gradients.members(bucket)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def flat_gradients(self, update: int, batches: Iterable[Batch], bucket: Bucket = WHOLE) -> Tensor:
        """Return an update's gradients as one vector; of what is looked up, the rows that its microbatches, which are `batches`, read.

        Raises:
            ConfigError: A layer has read others in the first update of a window, in which this is checked.
        """
        members = self.gradients.members(bucket)
        rows = self.lookups.rows(batches, of=members) if self.lookups else {}
        if rows and not update:
            self.lookups.check(self.gradients.gradients(update, list(rows)), rows)
        return self.gradients.flatten(update, rows, bucket)

    def shared_gradients(self, update: int) -> Tensor:
        """Return an update's shared gradients as a vector, to be summed over the tie."""
        return self.shared.pack(self.gradients.of(update))

    def update(self, update: int, *, scale: float | Tensor, learning_rate: float, keep_old: bool, shared: Tensor | None = None) -> None:
        """Make version `update + 1` from version `update`, and drop its gradients.

        Args:
            update: Number of the update in the window.
            scale: Factor that clips the gradients.
            learning_rate: Learning rate of this update.
            keep_old: Whether version `update` is still to be read.
            shared: Clipped sum of `shared_gradients`.
        """
        gradients = self.gradients.pop(update)
        if shared is not None:
            self.shared.unpack(shared, gradients)
        if keep_old:
            self.versions.move_masters()
        if self.optimizer is not None:
            # The host does not know whether a scale that the device computes is 1.
            for at in self.shared.unshared if isinstance(scale, Tensor) or scale != 1.0 else ():
                if (gradient := gradients[at]) is not None:
                    gradient.mul_(scale)
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = gradient
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            for master in self.masters:
                master.grad = None
        self.versions.set_newest(update + 1)
        if not keep_old:
            self._drop(update)

    def flat(self) -> Tensor:
        """Return the newest weights as one vector."""
        parts = [master.detach().reshape(-1) for master in self.masters]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.on)

    def receive(self, update: int, vector: Tensor) -> None:
        """Take version `update + 1` as another replica's `flat` vector, and drop this one's gradients."""
        self.gradients.pop(update)
        self.versions.move_masters()
        with torch.no_grad():
            for part, master in zip(torch.split(vector, [master.numel() for master in self.masters]), self.masters, strict=True):
                master.copy_(part.view_as(master))
        self.versions.set_newest(update + 1)
