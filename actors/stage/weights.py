"""The weights of one stage as the executor sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypipe.actors.stage.gradients import WHOLE, Bucket, GradientBuffers, squared_norm
from raypipe.actors.stage.late_gradients import LateGradients
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.lookups import Lookups
from raypipe.actors.stage.module import Outputs, StageModule
from raypipe.actors.stage.named_weights import NamedWeights, named_weights
from raypipe.actors.stage.optimizer_state import group_values
from raypipe.actors.stage.row_steps import stepped_rows
from raypipe.actors.stage.shards import Shards
from raypipe.actors.stage.ties import SharedGradients
from raypipe.actors.stage.versions import WeightVersions
from raypipe.model import Batch
from raypipe.schedules.ir import WeightRule

Optimizer = Callable[[NamedWeights], torch.optim.Optimizer]
"""Makes the optimizer of one stage from its weights."""
RATE_FACTOR = "learning_rate_factor"
"""Entry of an optimizer's parameter group: the factor of the learning rate; 1 where a group has none."""


@dataclass
class _LateRows:
    """An update of which some rows of looked-up weights are stepped when their gradients are summed; by position of the weight.

    Attributes:
        due: The rows that the next reader looks up.
        late: The rows whose gradients are summed later.
        before: Of the rows that are due, the values before the step.
        rates: Learning rate and delay of the update; `None` where it changes nothing.
    """

    due: dict[int, Tensor]
    late: dict[int, Tensor]
    before: dict[int, Tensor] = field(default_factory=dict)
    rates: tuple[float, float] | None = None


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
        self.optimizer = optimizer(named_weights(module, self.names, self.masters)) if self.masters else None
        self.group_values = group_values(self.optimizer) if self.optimizer is not None else []
        """Entries of the optimizer's groups, which stay as they are."""
        self.shards: Shards | None = None
        """Who steps which weights, where copies of the stage divide them."""
        self._late_rows: dict[int, _LateRows] = {}
        """By update, from the start of its sum to `update_late_rows`."""

    def divide(self, owners: Sequence[int], *, copy: int, num_copies: int, num_buckets: int) -> None:
        """Step only what one of the copies that divide the weights steps, and drop the optimizer's state of others. Between windows only.

        `owners` are those of the copies that step weights, in the order in which these lie.
        """
        self.shards = Shards(
            [master.numel() for master in self.masters],
            shared=[at for at in range(len(self.masters)) if at not in self.shared.unshared],
            buckets=[self.gradients.members((number, num_buckets)) for number in range(1, num_buckets + 1)],
            owners=owners,
            copy=copy,
            num_copies=num_copies,
        )
        for at, master in enumerate(self.masters):
            if self.optimizer is not None and at not in self.shards.stepped:
                self.optimizer.state.pop(master, None)

    def begin_window(self) -> None:
        """Make the newest version number 0."""
        self.versions.begin_window()
        self.gradients.begin_window()

    def end_window(self) -> None:
        """Keep only the newest version and put it into the module."""
        assert not self._late_rows, f"rows of updates {sorted(self._late_rows)} are not stepped"
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

    def squared_norm(self, update: int, *, late: bool = False) -> Tensor:
        """Return the sum of squares of an update's unshared gradients, in float64; of those that this copy steps, once they are summed.

        Weights with late rows count in `late` alone, when these are summed.
        """
        gradients = self.gradients.of(update)
        of_late = self._late_rows[update].due if update in self._late_rows else {}
        members = [at for at in self.shared.unshared if (at in of_late) == late]
        return squared_norm([gradient for at in members if (gradient := gradients[at]) is not None], on=self.on)

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

    def flat_gradients(
        self, update: int, batches: Iterable[Batch], bucket: Bucket = WHOLE, *, readers: Iterable[Batch] | None = None
    ) -> Tensor:
        """Return an update's gradients as one vector; of what is looked up, the rows that its microbatches, which are `batches`, read.

        With `readers`, those that read the new version, it has the rows that these look up, and `late_gradients` the others.

        Raises:
            ConfigError: A layer has read others in the first update of a window, in which this is checked.
        """
        members = self.gradients.members(bucket)
        rows = self.lookups.rows(batches, of=members) if self.lookups else {}
        if rows and not update:
            self.lookups.check(self.gradients.gradients(update, list(rows)), rows)
        if readers is not None:
            due = self.lookups.all_rows(readers, of=members)
            touched = {at: rows.get(at, torch.arange(self.lookups.num_rows[at], device=due[at].device)) for at in due}
            is_due = {at: torch.isin(of_weight, due[at], assume_unique=True) for at, of_weight in touched.items()}
            rows = {at: of_weight[is_due[at]] for at, of_weight in touched.items()}
            late = {at: of_weight[~is_due[at]] for at, of_weight in touched.items()}
            self._late_rows[update] = _LateRows({at: of_weight.to(self.on) for at, of_weight in due.items()}, late)
        return self.gradients.flatten(update, rows, bucket)

    def late_gradients(self, update: int, bucket: Bucket = WHOLE) -> Tensor:
        """Return the rows of an update's gradients that `flat_gradients` has left out, as one vector."""
        return self.gradients.flatten(update, self._late_rows[update].late, bucket, late=True)

    def shared_gradients(self, update: int) -> Tensor:
        """Return an update's shared gradients as a vector, to be summed over the tie."""
        return self.shared.pack(self.gradients.of(update))

    def update(
        self,
        update: int,
        *,
        scale: float | Tensor,
        learning_rate: float,
        keep_old: bool,
        shared: Tensor | None = None,
        steps: bool = True,
        delay: float = 0.0,
    ) -> None:
        """Make version `update + 1` from version `update`, and drop its gradients; of weights that copies divide, until `receive`, a part.

        Of weights with late rows, only what the readers look up has its new value until `update_late_rows`.

        Args:
            update: Number of the update in the window.
            scale: Factor that clips the gradients.
            learning_rate: Learning rate of this update.
            keep_old: Whether version `update` is still to be read.
            shared: Clipped sum of `shared_gradients`.
            steps: Whether weights and optimizer state change; otherwise the new version equals the old one.
            delay: Updates by which the gradients are late, the mean over all copies of the stage.
        """
        gradients = self.gradients.pop(update)
        late = self._late_rows.get(update)
        if late is not None:
            self.gradients.keep(update, {at: gradients[at] for at in late.due})
        if shared is not None:
            self.shared.unpack(shared, gradients)
        if keep_old:
            self.versions.move_masters()
        if self.optimizer is not None and steps:
            # The host does not know whether a scale that the device computes is 1.
            for at in self.shared.unshared if isinstance(scale, Tensor) or scale != 1.0 else ():
                if (gradient := gradients[at]) is not None:
                    gradient.mul_(scale)
            self._set_rates(learning_rate, delay)
            if late is not None:
                late.rates = learning_rate, delay
                self._step_due(late, gradients)
            self._step(gradients)
        if self.shards is None:
            self._advance(update, keep_old=keep_old)

    def _set_rates(self, learning_rate: float, delay: float) -> None:
        assert self.optimizer is not None, "there are weights to step"
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get(RATE_FACTOR, 1.0)
        if isinstance(self.optimizer, LateGradients):
            self.optimizer.delay = delay

    def _step(self, gradients: Sequence[Tensor | None]) -> None:
        assert self.optimizer is not None, "there are weights to step"
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    def _step_due(self, late: _LateRows, gradients: list[Tensor | None]) -> None:
        """Give rows the values that they will have, and take the gradients of their weights out of the list."""
        assert self.optimizer is not None, "there are weights to step"
        for at, rows in late.due.items():
            master, gradient = self.masters[at], gradients[at]
            gradients[at] = None
            if gradient is not None:
                master.grad = gradient
                values = stepped_rows(self.optimizer, master, rows)
                master.grad = None
                late.before[at] = master.data.index_select(0, rows)
                master.data.index_copy_(0, rows, values)

    def update_late_rows(self, update: int) -> None:
        """Step weights of which only some rows have been stepped, once all their gradients are summed."""
        late, gradients = self._late_rows.pop(update), self.gradients.pop(update)
        if late.rates is None or all(gradient is None for gradient in gradients):
            return
        for at, values in late.before.items():
            self.masters[at].data.index_copy_(0, late.due[at], values)
        self._set_rates(*late.rates)
        self._step(gradients)
        self.versions.renew(late.due)

    def _advance(self, update: int, *, keep_old: bool) -> None:
        self.versions.set_newest(update + 1)
        if not keep_old:
            self._drop(update)

    def flat(self) -> Tensor:
        """Return the vector of the weights that copies pass on to each other, in which what this copy does not step may be anything."""
        assert self.shards is not None, "copies divide the weights"
        masters = [self.masters[at] for at in self.shards.passed]
        dtype = functools.reduce(torch.promote_types, [master.dtype for master in masters], masters[0].dtype if masters else torch.float32)
        vector = torch.empty(sum(master.numel() for master in masters), dtype=dtype, device=self.on)
        for at, part in self._passed(vector):
            if at in self.shards.stepped:
                part.copy_(self.masters[at].detach().reshape(-1))
        return vector

    def _passed(self, vector: Tensor) -> Iterator[tuple[int, Tensor]]:
        assert self.shards is not None, "copies divide the weights"
        yield from zip(self.shards.passed, torch.split(vector, [self.masters[at].numel() for at in self.shards.passed]), strict=True)

    def receive(self, update: int, vector: Tensor, *, keep_old: bool) -> None:
        """Make version `update + 1` whole by what other copies have stepped: the `flat` vector with their parts.

        A copy that steps nothing drops its gradients.
        """
        assert self.shards is not None, "copies divide the weights"
        self.gradients.pop(update)
        if keep_old:
            self.versions.move_masters()
        with torch.no_grad():
            for at, part in self._passed(vector):
                if at not in self.shards.stepped:
                    self.masters[at].copy_(part.view_as(self.masters[at]))
        self._advance(update, keep_old=keep_old)
