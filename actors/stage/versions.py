"""The tensors that each version of a stage's weights is computed with.

The optimizer steps `masters`, aliases of the weights. Autograd counts their changes apart, so under `live` an update may write below a
graph in flight, whose backward then reads the new values. Weights computed with in lower precision have copies, renewed by every update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from raypipe.actors.stage.module import StageModule
from raypipe.errors import ConfigError


class _Leaves:
    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.by_name = dict(zip(names, tensors, strict=True))
        self._addresses = [tensor.data_ptr() for tensor in tensors]

    def check(self, module: StageModule) -> None:
        for (name, tensor), address in zip(self.by_name.items(), self._addresses, strict=True):
            if tensor.data_ptr() != address:
                _, index, weight = name.split(".", 2)
                raise ConfigError(
                    f"layer {module.specs[int(index)].name!r} has put another tensor in the place of its weight {weight!r}, where no "
                    "update would reach it; write in place, `weight.data.copy_(...)`"
                )


class WeightVersions:
    """The trained weights of one stage in every version that is still to be read.

    Attributes:
        separate: Whether each version has separate tensors (`stash`, `double_buffer`), not the module's.
        masters: Tensors that the optimizer steps, in the order of `names`.
    """

    def __init__(self, module: StageModule, *, separate: bool) -> None:
        self.separate = separate
        self.newest = 0
        self._module = module
        trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.names = list(trained)
        self.masters = [nn.Parameter(weight.data) for weight in trained.values()]
        self._dtypes = [master.dtype for master in self.masters]
        self._copies: list[tuple[Tensor, Tensor]] = []  # of the module's parameters: master and copy
        self._own = _Leaves(self.names, list(trained.values()))
        self._versions = {0: self._new_leaves()} if separate else {0: self._own}
        self._have_moved = False

    @property
    def num_versions(self) -> int:
        """Copies of the weights in memory."""
        return len(self._versions)

    @property
    def low_precision_bytes(self) -> int:
        """Bytes of one version's lower-precision copies."""
        return sum(copy.nbytes for _, copy in self._copies)

    def tensors(self, version: int) -> Sequence[Tensor]:
        """Return the tensors that a version computes with."""
        return self._versions[version].tensors if self.separate else self._own.tensors

    def by_name(self, version: int) -> dict[str, Tensor]:
        """Return a version's separate tensors by parameter name."""
        return self._versions[version].by_name

    def lower(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Compute with copies of these weights in another precision. Between windows only."""
        assert self.num_versions == 1, "weights are lowered between windows only"
        self._dtypes = [dtype if name in names else now for name, now in zip(self.names, self._dtypes, strict=True)]
        self._copies = []
        for own, master, to in zip(self._own.tensors, self.masters, self._dtypes, strict=True):
            if to != master.dtype:
                own.data = master.data.to(to)
                own.grad_dtype = master.dtype
                self._copies.append((master, own))
        self._own_has_moved()
        self.set_newest(self.newest)

    def begin_window(self) -> None:
        """Make the newest version number 0."""
        assert self.num_versions == 1, f"versions {sorted(self._versions)} of the last window are left over"
        self._versions = {0: next(iter(self._versions.values()))}
        self.newest = 0

    def end_window(self) -> None:
        """Keep only the newest version and put it into the module, for evaluation and checkpoints."""
        self.check_in_place()
        if self.separate:
            self._versions = {self.newest: self._versions[self.newest]}
            for own, leaf in zip(self._own.tensors, self.tensors(self.newest), strict=True):
                own.data = leaf.data
            self._own_has_moved()

    def set_newest(self, version: int) -> None:
        """Make the newest version from the masters."""
        if self.separate:
            self._versions[version] = self._new_leaves()
        else:
            for master, copy in self._copies:
                copy.data.copy_(master.data)
        self.newest = version
        self._have_moved = False

    def renew(self, positions: Iterable[int]) -> None:
        """Let the newest version compute with what its masters at some positions have become; separate versions only."""
        for at in positions:
            leaf, master = self._versions[self.newest].tensors[at], self.masters[at]
            if leaf.dtype != master.dtype:  # else they share memory
                leaf.data.copy_(master.data)

    def move_masters(self) -> None:
        """Move the masters, and the module's parameters, off memory that a version reads, once for each new version."""
        if self.separate and not self._have_moved:
            self._have_moved = True
            for master, own, dtype in zip(self.masters, self._own.tensors, self._dtypes, strict=True):
                if master.dtype == dtype:
                    master.data = own.data = master.data.clone()  # or `own` would keep the oldest version alive
            self._own_has_moved()

    def drop(self, version: int) -> None:
        """Check and drop a version's separate tensors."""
        if (dropped := self._versions.pop(version, None)) is not None:
            dropped.check(self._module)

    def check_in_place(self) -> None:
        """Check that layers compute with the tensors that updates write.

        Raises:
            ConfigError: A layer has put other memory in a weight's place.
        """
        for leaves in dict.fromkeys((self._own, *self._versions.values())):
            leaves.check(self._module)

    def _own_has_moved(self) -> None:
        self._own = _Leaves(self.names, self._own.tensors)
        if not self.separate:
            self._versions = {version: self._own for version in self._versions}

    def _new_leaves(self) -> _Leaves:
        leaves: list[Tensor] = []
        for own, master, dtype in zip(self._own.tensors, self.masters, self._dtypes, strict=True):
            leaf = master.data.to(dtype).requires_grad_()
            if dtype != master.dtype:
                leaf.grad_dtype = master.dtype
            _copy_hooks(own, leaf)
            leaves.append(leaf)
        return _Leaves(self.names, leaves)


def _copy_hooks(source: Tensor, target: Tensor) -> None:
    # The hooks that the layer has put on its parameter. Torch has no public way to list them.
    for on_gradient in (source._backward_hooks or {}).values():
        target.register_hook(on_gradient)  # type: ignore[no-untyped-call]
    for after_accumulation in (source._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(after_accumulation)  # type: ignore[no-untyped-call]
