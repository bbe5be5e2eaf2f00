"""The gradients of a stage's weights: one buffer per update, as tensors or as one vector for a reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypipe.actors import devices


def match_layout(values: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return `values` in the shape, dtype and memory order of `weight`, by which optimizer kernels pair elements."""
    shaped = values.view_as(weight).to(dtype or weight.dtype)
    return shaped if weight.is_contiguous() else torch.empty_like(weight, dtype=shaped.dtype, requires_grad=False).copy_(shaped)


def squared_norm(gradients: list[Tensor], *, on: torch.device = devices.CPU) -> Tensor:
    """Return the sum of squares as a float64 scalar; zero on device `on` without gradients."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=on)
    if not gradients[0].is_cpu:
        return torch.nn.utils.get_total_norm(gradients).double().square()  # takes few kernels
    # Norms per tensor in their own precision, squares and their sum in double: large models must not overflow.
    return torch.stack([torch.linalg.vector_norm(gradient).double() for gradient in gradients]).square().sum()


class FlatLayout:
    """Gradients of several weights as one vector: all values, then a 1 for each weight with a gradient, else a 0.

    A sum has a gradient where any part has one. `sizes` are elements and dtype of each weight.
    """

    def __init__(self, sizes: Iterable[tuple[int, torch.dtype]], *, on: torch.device) -> None:
        self._sizes = tuple(sizes)
        self._on = on

    def pack(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients, one per weight, as a vector."""
        if not self._sizes:
            return torch.zeros(0, device=self._on)
        values = [
            torch.zeros(numel, dtype=dtype, device=self._on) if gradient is None else gradient.reshape(-1)
            for gradient, (numel, dtype) in zip(gradients, self._sizes, strict=True)
        ]
        # Made on the device: the host would have to wait for a copy.
        one, zero = (torch.full((1,), value, dtype=values[0].dtype, device=self._on) for value in (1.0, 0.0))
        return torch.cat([*values, *(zero if gradient is None else one for gradient in gradients)])

    def values(self, vector: Tensor) -> Tensor:
        """Return a vector's part that holds gradients."""
        return vector[: len(vector) - len(self._sizes)]

    def unpack(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Return each weight's part of a vector, one-dimensional."""
        return torch.split(self.values(vector), [numel for numel, _ in self._sizes])

    def present(self, vector: Tensor, known: Sequence[bool]) -> Sequence[bool]:
        """Return which weights have a gradient in a sum; `known` tells which certainly do."""
        # Read only if needed: the host waits for the device.
        return known if all(known) else [bool(count) for count in vector[len(vector) - len(self._sizes) :].tolist()]


class _Bound(NamedTuple):
    version: int
    update: int
    leaves: Sequence[Tensor]


class GradientBuffers:
    """One gradient buffer per update under way, like `masters`, bound as `.grad` of the tensors of `bound_version`."""

    def __init__(self, masters: Sequence[Tensor], *, on: torch.device) -> None:
        self._masters = masters
        self._layout = FlatLayout([(master.numel(), master.dtype) for master in masters], on=on)
        self._buffers: dict[int, list[Tensor | None]] = {}
        self._bound: _Bound | None = None

    def begin_window(self) -> None:
        """Assert that no buffers are left."""
        assert not self._buffers, f"gradients of updates {sorted(self._buffers)} of the last window are left over"
        self._bound = None

    def end_window(self, *, stage: int) -> None:
        """Drop the buffers; assert that they are empty."""
        left = [update for update, buffer in self._buffers.items() if any(gradient is not None for gradient in buffer)]
        assert not left, f"stage {stage} has gradients left of updates {sorted(left)}"
        self._buffers.clear()

    @property
    def bound_version(self) -> int | None:
        """The version whose tensors have a buffer as `.grad`."""
        return None if self._bound is None else self._bound.version

    def bind(self, update: int, version: int, leaves: Sequence[Tensor]) -> None:
        """Put an update's buffer into the `.grad` of a version's tensors."""
        if self._bound is not None and self._bound[:2] == (version, update):
            return
        self.unbind()
        for leaf, gradient in zip(leaves, self.of(update), strict=True):
            leaf.grad = gradient
        self._bound = _Bound(version, update, leaves)

    def unbind(self) -> None:
        """Move the bound `.grad` back into its buffer."""
        if self._bound is None:
            return
        self._buffers[self._bound.update] = [leaf.grad for leaf in self._bound.leaves]
        for leaf in self._bound.leaves:
            leaf.grad = None
        self._bound = None

    def of(self, update: int) -> list[Tensor | None]:
        """Return the buffer of an update; another thread may ask for one that is not bound."""
        bound = self._bound
        if bound is not None and bound.update == update:
            self.unbind()
        return self._buffers.setdefault(update, [None] * len(self._masters))

    def pop(self, update: int) -> list[Tensor | None]:
        """Return and drop the buffer of an update."""
        self.unbind()
        return self._buffers.pop(update, [None] * len(self._masters))

    def flatten(self, update: int) -> Tensor:
        """Return an update's buffer as a vector, of which its gradients become views."""
        gradients = self.of(update)
        vector = self._layout.pack(gradients)
        self._set(update, vector, [gradient is not None for gradient in gradients])
        return vector

    def set_flat(self, update: int, vector: Tensor) -> None:
        """Replace an update's buffer by a sum of replicas' vectors."""
        self._set(update, vector, self._layout.present(vector, [gradient is not None for gradient in self.of(update)]))

    def _set(self, update: int, vector: Tensor, present: Sequence[bool]) -> None:
        parts = zip(self._layout.unpack(vector), self._masters, present, strict=True)
        self._buffers[update] = [match_layout(part, master) if has else None for part, master, has in parts]
