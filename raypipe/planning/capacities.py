"""What links carry between devices at most: the rates that bounds count with."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.planning.problem import Floats, Problem

_MOST_MEMBERS = 8  # Most devices of a worker of which all borders between members are looked at.
_NO_LIMIT = 1e300


class PortRates(NamedTuple):
    """Most bytes per second of each member of a worker.

    Attributes:
        out: Those that leave it for devices outside the worker.
        into: Those that come to it from such devices.
        of_sum: Those that leave it for other members, of one sum.
        of_sums: Those that leave it for other members, of several sums at once.
        border: Those that cross the narrowest border between some members and the others.
        port: Those that leave it in all.
    """

    out: Floats
    into: Floats
    of_sum: Floats
    of_sums: Floats
    border: float
    port: Floats


@dataclass(frozen=True)
class Capacities:
    """Most bytes per second from some devices of a problem to others."""

    problem: Problem

    @cached_property
    def of_ports(self) -> tuple[Floats, Floats]:
        """Most bytes per second that leave each device, and that come to it."""
        alone = np.eye(self.problem.num_devices, dtype=bool)
        out, into = (
            [self.between(*ends) for ends in pairs] for pairs in (zip(alone, ~alone, strict=True), zip(~alone, alone, strict=True))
        )
        return np.array(out), np.array(into)

    def of_members(self, members: Sequence[int]) -> PortRates:
        """Return the rates of the members of a worker."""
        chosen = list(members)
        out, into = (rates[chosen] for rates in self.of_ports)
        port = out
        if self.problem.has_plain_links:
            # Elsewhere members might share what leads out of them.
            alone = np.eye(self.problem.num_devices, dtype=bool)[chosen]
            outside = ~alone.any(axis=0)
            out, into = (
                np.array([self._plainly_between(*ends) for ends in pairs])
                for pairs in ([(device, outside) for device in alone], [(outside, device) for device in alone])
            )
        return PortRates(out, into, *self._of_sums_within(chosen), port)

    def _of_sums_within(self, members: list[int]) -> tuple[Floats, Floats, float]:
        """Return the most bytes per second that leave each member for others, of one sum, as `of_sum`, and of several at once.

        And the least that cross a border between members: all gradients of those on one side cross it to the others, in shares or totals.
        """
        problem = self.problem
        links = problem.bandwidth[np.ix_(members, members)].copy()
        np.fill_diagonal(links, 0.0)
        links = np.where(np.isfinite(links), links, _NO_LIMIT)
        are_apart = self.are_apart[np.ix_(members, members)]
        by_port = self._to_one_node(np.where(are_apart, 0.0, links), problem.nodes_of[members])
        of_sum: Floats = np.where(are_apart, links, 0.0).sum(axis=1) + by_port
        of_sums = np.minimum(links.sum(axis=1), self.of_ports[0][members])
        if not 1 < len(members) <= _MOST_MEMBERS:
            return of_sum, of_sums, math.inf
        sides = (np.array(side) for side in itertools.product((0.0, 1.0), repeat=len(members)))
        return of_sum, of_sums, min(float(side @ links @ (1 - side)) for side in sides if 0 < side.sum() < len(members))

    def of_sum(self, num_members: int) -> Floats:
        """Return for each device the most bytes per second of one sum that leave it, 0 where it has no link.

        What it sends to several other nodes by its node's port passes that at the rate of the quickest path (`simulation.transfers`);
        within its node, over stated links, or to the devices of one other node that have links of their own, it may send to all at once.
        """
        apart, by_port = self._from_each
        rates: Floats = apart[:, : num_members - 1].sum(axis=1) + by_port
        return rates

    @cached_property
    def are_apart(self) -> NDArray[np.bool_]:
        """Whether what one device sends another one does not pass the port of its node."""
        problem, topology = self.problem, self.problem.topology
        if problem.has_plain_links:
            of_nodes = np.eye(len(topology.nodes), dtype=bool)
            sources, targets, rates, _ = problem.plain_links
            of_nodes[sources, targets] = np.isfinite(rates)
            return of_nodes[np.ix_(problem.nodes_of, problem.nodes_of)]
        by_port = [
            problem.path(sources[0], targets[0] if targets[0] != sources[0] else targets[-1]).port for sources, targets in problem.blocks
        ]
        apart = np.array([port is None for port in by_port], dtype=bool)
        return np.where(problem.block_of >= 0, apart[problem.block_of], False)

    @cached_property
    def _has_links_of_devices(self) -> bool:
        return all(len(starts) == len(ends) == 1 for starts, ends in self.problem.blocks)

    def _to_one_node(self, links: Floats, nodes: NDArray[np.int_]) -> Floats:
        """Return the most bytes per second that leave each of some devices on these nodes for one other node."""
        fastest: Floats = links.max(axis=1, initial=0.0)
        if self._has_links_of_devices:
            finite = np.where(np.isfinite(links), links, _NO_LIMIT)
            fastest = np.maximum(fastest, (finite @ np.equal.outer(nodes, np.unique(nodes))).max(axis=1, initial=0.0))
        return fastest

    @cached_property
    def _from_each(self) -> tuple[Floats, Floats]:
        problem = self.problem
        linked = problem.bandwidth.copy()
        np.fill_diagonal(linked, 0.0)
        by_port = self._to_one_node(np.where(self.are_apart, 0.0, linked), problem.nodes_of)
        return np.sort(np.where(self.are_apart, linked, 0.0), axis=1)[:, ::-1], by_port

    def between(self, sources: NDArray[np.bool_], targets: NDArray[np.bool_]) -> float:
        """Return the most bytes per second from some devices to others.

        Every path is charged to one of its wires, and the wires add up; of several ways to choose them, the one that gives the least. A
        port that many paths share should have all of them.
        """
        problem = self.problem
        if problem.has_plain_links:
            return self._plainly_between(sources, targets)
        blocks, num_pairs = np.unique(problem.block_of[np.ix_(sources, targets)], return_counts=True)
        rates: list[dict[str, float]] = []
        for block, count in zip(blocks.tolist(), num_pairs.tolist(), strict=True):
            starts, ends = problem.blocks[block]
            one, other = starts[0], ends[-1]
            path = problem.path(one, other)
            if not path.exists:
                continue
            if path.bandwidth_bytes_per_s == math.inf:
                return math.inf
            # Within a node each ordered pair has a wire of its own; two nodes share one.
            times = count if problem.node_of[one] == problem.node_of[other] else 1
            rates.append({name: bandwidth * times for name, bandwidth in path.resources})
        passing = Counter(itertools.chain.from_iterable(rates))
        widest: dict[str, float] = {}
        for of_path in rates:
            for name, rate in of_path.items():
                widest[name] = max(widest.get(name, 0.0), rate)
        ranks = (widest.__getitem__, lambda name: widest[name] / passing[name], lambda name: -passing[name])
        chosen = ({min(of_path, key=rank) for of_path in rates} for rank in ranks)
        return min(math.fsum(map(widest.__getitem__, wires)) for wires in chosen)

    def _plainly_between(self, sources: NDArray[np.bool_], targets: NDArray[np.bool_]) -> float:
        """Return `between` where each pair of nodes has a wire of its own each way, and each pair of devices within a node."""
        problem = self.problem
        numbers = np.flatnonzero(sources), np.flatnonzero(targets)
        # A device of each node stands for all others of it.
        of_sources, of_targets = (each[np.unique(problem.nodes_of[each], return_index=True)[1]] for each in numbers)
        across = problem.bandwidth[np.ix_(of_sources, of_targets)]
        across = np.where(np.equal.outer(problem.nodes_of[of_sources], problem.nodes_of[of_targets]), 0.0, across)
        shared = np.intersect1d(problem.nodes_of[of_sources], problem.nodes_of[of_targets])
        inside = 0.0
        for node in shared.tolist():
            within = problem.nodes_of == node
            inside += float(problem.bandwidth[np.ix_(within & sources, within & targets)].sum())
        return float(across.sum()) + inside
