"""The gradients of a stage's weights: one buffer per update, as tensors or as one vector for a reduction.

A weight that is only looked up has a dense gradient, of which a vector takes the rows that any microbatch of the update reads; or it takes
some of these rows, and a late vector the others. The sum is scattered back. All other rows are zeros on all replicas, so weights and norms
are those of the whole sum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from raypipe.actors import devices
from raypipe.actors.transport.protocol import Places
from raypipe.communication.buckets import buckets


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


Bucket = tuple[int, int]
"""Number of a bucket, from 1, and how many there are; (0, 1) for undivided gradients."""
WHOLE: Bucket = (0, 1)


class _Exchange:
    """How gradients of one update become a vector: of weights in `rows` these rows, by position and ascending, of others all.

    `members` are the positions of the weights in their stage. A late vector has nothing of weights that are not in `rows`.
    """

    def __init__(
        self, members: Sequence[int], masters: Sequence[Tensor], rows: Mapping[int, Tensor], *, on: torch.device, late: bool = False
    ) -> None:
        self.members = members
        self.late = late
        self._sizes = [master.numel() for master in masters]
        self._widths = {at: math.prod(masters[at].shape[1:]) for at in rows}
        self._rows = {at: of_weight.cpu() for at, of_weight in rows.items()}
        self._taken = [len(rows[at]) * self._widths[at] if at in rows else 0 if late else size for at, size in enumerate(self._sizes)]
        self.rows = {at: of_weight.to(on) for at, of_weight in rows.items()}
        self.layout = FlatLayout([(numel, master.dtype) for numel, master in zip(self._taken, masters, strict=True)], on=on)

    def pack(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the vector."""
        return self.layout.pack([None if gradient is None else self._part(at, gradient) for at, gradient in enumerate(gradients)])

    def _part(self, at: int, gradient: Tensor) -> Tensor:
        if at in self.rows:
            return gradient.index_select(0, self.rows[at])
        return gradient.reshape(-1)[:0] if self.late else gradient

    @property
    def places(self) -> Places | None:
        """Where the numbers of the vector stand in that of the whole gradients; `None` where it is that."""
        if not self.rows:
            return None
        whole, taken = ([0, *accumulate(sizes)] for sizes in (self._sizes, self._taken))

        def num_before(place: int) -> int:
            at = bisect_right(whole, place) - 1
            within = place - whole[at]
            if at in self._rows:
                rows, (row, column) = self._rows[at], divmod(within, self._widths[at])
                above = int(torch.searchsorted(rows, row))
                is_taken = above < len(rows) and int(rows[above]) == row
                within = above * self._widths[at] + (column if is_taken else 0)
            elif self.late and at < len(self._sizes):
                within = 0
            return taken[at] + within

        return Places(whole[-1] + len(self._sizes), num_before)


class _Bound(NamedTuple):
    version: int
    update: int
    leaves: Sequence[Tensor]


class GradientBuffers:
    """One gradient buffer per update under way, like `masters`, bound as `.grad` of the tensors of `bound_version`.

    `layers` are the layers of the masters, which buckets are made of; equal numbers by default.
    """

    def __init__(self, masters: Sequence[Tensor], *, on: torch.device, layers: Sequence[int] = ()) -> None:
        self._masters = masters
        self._layers = layers or [0] * len(masters)
        self._on = on
        self._members: dict[int, list[list[int]]] = {}
        self._all_rows: dict[Bucket, _Exchange] = {}
        self._exchanges: dict[tuple[int, int, bool], _Exchange] = {}
        """By update and bucket, and whether it is late, while its vector is under way."""
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
        self._exchanges.clear()

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

    def keep(self, update: int, gradients: Mapping[int, Tensor | None]) -> None:
        """Make a buffer that has some gradients, by position, of one that has been dropped."""
        self._buffers[update] = [gradients.get(at) for at in range(len(self._masters))]

    def members(self, bucket: Bucket) -> list[int]:
        """Return the positions of the weights of a bucket, in order."""
        number, count = bucket
        if count not in self._members:
            sizes: dict[int, int] = {}
            for layer, master in zip(self._layers, self._masters, strict=True):
                sizes[layer] = sizes.get(layer, 0) + master.nbytes
            layers = list(sizes)
            bucket_of = {layers[at]: place for place, found in enumerate(buckets(tuple(sizes.values()), count)) for at in found}
            self._members[count] = [[] for _ in range(count)]
            for position, layer in enumerate(self._layers):
                self._members[count][bucket_of[layer]].append(position)
        return self._members[count][max(number - 1, 0)]

    def gradients(self, update: int, members: Sequence[int]) -> list[Tensor | None]:
        """Return some gradients of an update, where they are: in the buffer, or bound while a backward adds to others."""
        bound = self._bound
        if bound is not None and bound.update == update:
            return [bound.leaves[at].grad for at in members]
        buffer = self._buffers.setdefault(update, [None] * len(self._masters))
        return [buffer[at] for at in members]

    def flatten(self, update: int, rows: Mapping[int, Tensor] | None = None, bucket: Bucket = WHOLE, *, late: bool = False) -> Tensor:
        """Return an update's gradients as a vector, of which they become views, where they are (`gradients`).

        Of weights in `rows`, by position, the vector takes these rows alone, and their gradients stay as they are. A late vector has
        nothing else.
        """
        members = self.members(bucket)
        gradients, masters = self.gradients(update, members), [self._masters[at] for at in members]
        taken = {place: rows[at] for place, at in enumerate(members) if at in rows} if rows else {}
        if taken or late:
            exchange = _Exchange(members, masters, taken, on=self._on, late=late)
        elif bucket in self._all_rows:
            exchange = self._all_rows[bucket]
        else:
            exchange = self._all_rows[bucket] = _Exchange(members, masters, {}, on=self._on)
        self._exchanges[update, bucket[0], late] = exchange
        vector = exchange.pack(gradients)
        if late:
            return vector
        bound = self._bound
        for place, (part, gradient) in enumerate(zip(exchange.layout.unpack(vector), gradients, strict=True)):
            if gradient is None or place in exchange.rows:
                continue
            view = match_layout(part, masters[place])
            if bound is not None and bound.update == update:
                bound.leaves[members[place]].grad = view
            else:
                self._buffers[update][members[place]] = view
        return vector

    def places(self, update: int, bucket: Bucket = WHOLE, *, late: bool = False) -> Places | None:
        """Return where the numbers of an update's vector stand in that of all rows; `None` where it has all."""
        return self._exchanges[update, bucket[0], late].places

    def set_flat(
        self, update: int, vector: Tensor, bucket: Bucket = WHOLE, *, kept: Collection[int] | None = None, late: bool = False
    ) -> None:
        """Replace gradients of an update by a sum of replicas' vectors; keep only some where others are another copy's."""
        gradients, exchange = self.of(update), self._exchanges.pop((update, bucket[0], late))
        members = exchange.members
        concerned = [not late or place in exchange.rows for place in range(len(members))]
        known = [not taken or gradients[at] is not None for at, taken in zip(members, concerned, strict=True)]
        present = exchange.layout.present(vector, known)
        for place, (at, part, has) in enumerate(zip(members, exchange.layout.unpack(vector), present, strict=True)):
            master = self._masters[at]
            if not concerned[place]:
                continue
            if not has or (kept is not None and at not in kept):
                gradients[at] = None
            elif place not in exchange.rows:
                gradients[at] = match_layout(part, master)
            else:
                gradient = gradients[at] = _or_zeros(gradients[at], master)
                gradient.index_copy_(0, exchange.rows[place], part.view(-1, *master.shape[1:]).to(gradient.dtype))


def _or_zeros(gradient: Tensor | None, master: Tensor) -> Tensor:
    return torch.zeros_like(master, requires_grad=False) if gradient is None else gradient
