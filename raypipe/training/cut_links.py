"""Pairs of nodes that have lost each other, which a run does without until they reach each other again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from raypipe.cluster.stage_actors import StageActors
from raypipe.errors import RunError, TransportError

Pair = frozenset[str]
"""Ids of two nodes."""

_TRY_S = 2.0  # for a connection between two nodes that a failure names
_AWAY_S = 5.0  # until a pair is tried again that was lost once; each further time four times as long


class CutLinks(Collection[Pair]):
    """The links that plans must do without; iterates over their pairs of nodes."""

    def __init__(self, actors: StageActors) -> None:
        self._actors = actors
        self._cut: dict[Pair, float] = {}  # since when, by the clock of `time.monotonic`
        self._doubted: set[Pair] = set()  # lost each other once
        self._num_cuts: Counter[Pair] = Counter()
        self._trials: dict[Pair, Any] = {}  # calls under way

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._cut)

    def __contains__(self, nodes: object) -> bool:
        return nodes in self._cut

    def __len__(self) -> int:
        return len(self._cut)

    def trust(self) -> None:
        """Forget what was doubted: the run has got on since."""
        self._doubted.clear()

    def loses(self, error: RunError | None) -> Pair | None:
        """Return the nodes that have lost each other according to a failure, and cut the link between them.

        They do not reach each other now, or the run has failed between them for the second time since it got on.
        """
        if not isinstance(error, TransportError):
            return None
        node_of = {member.slot.name: member.slot.node.node_id for member in self._actors.launched}
        names = [error.peer] if error.peer in node_of else error.peer.split(", ")  # of a sum, all other members
        pairs = {frozenset((node_of[error.device], node_of[name])) for name in names if {error.device, name} <= node_of.keys()}
        pairs = {nodes for nodes in pairs if len(nodes) == 2 and nodes not in self._cut}
        trials = {nodes: self._actors.try_link(nodes, timeout_s=_TRY_S) for nodes in pairs}
        for nodes, trial in trials.items():
            if not self._actors.is_reached(trial, timeout_s=2 * _TRY_S):
                return self._cut_off(nodes)
        if len(pairs) != 1:
            return None
        (nodes,) = pairs
        if nodes in self._doubted:
            return self._cut_off(nodes)
        self._doubted.add(nodes)
        return None

    def _cut_off(self, nodes: Pair) -> Pair:
        self._cut[nodes] = time.monotonic()
        self._num_cuts[nodes] += 1
        return nodes

    def keep(self, nodes: Pair) -> None:
        """Use a link all the same, because no plan does without it."""
        self._cut.pop(nodes, None)
        self._doubted.discard(nodes)

    def come_back(self) -> bool:
        """Return whether nodes reach each other again since the last call, and use their link again; does not wait for any node."""
        is_back = False
        for nodes, since_s in list(self._cut.items()):
            if time.monotonic() - since_s < _AWAY_S * 4 ** (self._num_cuts[nodes] - 1):
                continue
            trial = self._trials.pop(nodes, None)
            if trial is not None and self._actors.is_reached(trial, timeout_s=0.0):
                self.keep(nodes)
                is_back = True
            else:
                self._trials[nodes] = self._actors.try_link(nodes, timeout_s=_TRY_S)
        return is_back
