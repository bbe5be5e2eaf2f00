"""Which copy of a stage steps which of its weights, where the copies divide the optimizer's state (ZeRO stage 1).

Weights are not cut. Each bucket of gradients is divided, so that all owners have something to do with each. Weights that other stages
share are stepped by every owner, and passed on by one of them to copies that own nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.communication.shards import Segment, owners_of, segments_of


class Shards:
    """The owners of a stage's weights, by position among its copies.

    Args:
        sizes: Numbers of each weight.
        shared: Positions of the weights that other stages share.
        buckets: Positions of the weights of each bucket of gradients.
        owners: Copies that own weights, in the order in which these lie.
        copy: Position of this copy.
        num_copies: Number of all copies.

    Attributes:
        stepped: Positions of the weights that this copy steps.
        passed: Positions of the weights that copies pass on to each other, in the order of the vector in which they do.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        shared: Sequence[int],
        buckets: Sequence[Sequence[int]],
        owners: Sequence[int],
        copy: int,
        num_copies: int,
    ) -> None:
        self._sizes = sizes
        self._owners: list[int | None] = [None] * len(sizes)
        for bucket in buckets:
            divided = [at for at in bucket if at not in shared]
            for at, owner in zip(divided, owners_of([sizes[at] for at in divided], owners), strict=True):
                self._owners[at] = owner
        of_all = {None} if copy in owners else set()
        self.stepped = frozenset(at for at, owner in enumerate(self._owners) if owner in {copy, *of_all})
        self._senders = list(self._owners)
        if len(owners) < num_copies:
            self._senders = [owners[0] if sender is None else sender for sender in self._owners]
        self.passed = tuple(at for owner in owners for at, sender in enumerate(self._senders) if sender == owner)

    def of_gradients(self, members: Sequence[int]) -> tuple[Segment, ...]:
        """Return who gets which part of the vector of some gradients, which ends with a number for each."""
        return segments_of([*(self._sizes[at] for at in members), len(members)], [*(self._owners[at] for at in members), None])

    @property
    def of_weights(self) -> tuple[Segment, ...]:
        """Who sends which part of the vector of the weights that are passed on."""
        return segments_of([self._sizes[at] for at in self.passed], [self._senders[at] for at in self.passed])
