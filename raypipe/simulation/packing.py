"""Sums along several trees at once, each slice as long as the links of its tree are good, so that all links work until the end.

A tree carries its slice once each way over each of its links: shares towards the root, totals away from it. How long slices are best is a
linear program over trees (Blink, Wang et al., MLSys 2020; the packing of spanning trees). Of all trees those count that are the cheapest,
in turn, at prices that rise with what the trees so far put on each link (multiplicative weights, Garg and Koenemann, SIAM J. Comput. 2007).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from raypipe.communication.patterns import Pattern, Tree, ring
from raypipe.simulation.paths import PathOf

Edge = tuple[int, int]
_NUM_TREES = 40
"""That are tried. For 8 members the best slices along them are within 1 % of those along all trees, for 12 within 4 %."""
_STEEPNESS = 3.0
"""How fast prices rise; with 8 the best of the same number of trees is as good."""
_LEAST_GAIN = 1.05
"""How much quicker several trees must be than one."""
_WHOLE = 1024
"""Into how many parts numbers are divided among slices."""


class _Links:
    """What each pair of members puts on each limited link, in seconds per byte, if a slice goes over it."""

    def __init__(self, num_members: int, path: PathOf) -> None:
        self.num_members = num_members
        self.pairs = list(itertools.combinations(range(num_members), 2))
        number_of: dict[str, int] = {}
        entries: list[tuple[int, int, float]] = []
        for number, pair in enumerate(self.pairs):
            for source, target in (pair, pair[::-1]):
                way = path(source, target)
                port = [(f"{source} by {way.port}", way.bandwidth_bytes_per_s)] if way.port is not None else []
                for name, bandwidth in (*way.resources, *port):
                    entries.append((number, number_of.setdefault(name, len(number_of)), 1 / bandwidth))
        self.seconds = np.zeros((len(self.pairs), len(number_of)))
        for number, link, seconds in entries:
            self.seconds[number, link] += seconds
        self.number_of = {pair: number for number, pair in enumerate(self.pairs)}
        self._between = np.zeros((num_members, num_members), dtype=np.intp)
        for number, (one, other) in enumerate(self.pairs):
            self._between[one, other] = self._between[other, one] = number

    def cheapest(self, prices: NDArray[np.float64]) -> tuple[Edge, ...]:
        """Return the edges of the tree that costs the least (Prim's algorithm)."""
        costs = (self.seconds @ prices)[self._between]
        np.fill_diagonal(costs, np.inf)
        best, nearest = costs[0].copy(), np.zeros(self.num_members, dtype=np.intp)
        is_outside = np.ones(self.num_members, dtype=bool)
        is_outside[0] = False
        edges: list[Edge] = []
        for _ in range(self.num_members - 1):
            newest = int(np.where(is_outside, best, np.inf).argmin())
            edges.append((min(newest, int(nearest[newest])), max(newest, int(nearest[newest]))))
            is_outside[newest] = False
            is_nearer = costs[newest] < best
            best[is_nearer], nearest[is_nearer] = costs[newest][is_nearer], newest
        return tuple(sorted(edges))

    def loads(self, edges: Sequence[Edge]) -> NDArray[np.float64]:
        """Return what a tree puts on each link."""
        found: NDArray[np.float64] = self.seconds[[self.number_of[edge] for edge in edges]].sum(axis=0)
        return found


def packed(num_members: int, path: PathOf) -> Pattern | None:
    """Return the pattern whose slices go along several trees so that the busiest link is done soonest, or `None` where one will do."""
    links = _Links(num_members, path)
    if not links.seconds.any():
        return None
    loads = np.zeros(links.seconds.shape[1])
    found: dict[tuple[Edge, ...], NDArray[np.float64]] = {}
    for count in range(1, _NUM_TREES + 1):
        prices = np.exp(_STEEPNESS * np.log(count) * (loads / max(loads.max(), 1e-300) - 1))
        edges = links.cheapest(prices)
        of_tree = found.get(edges)
        if of_tree is None:
            of_tree = found[edges] = links.loads(edges)
        loads += of_tree
    of_trees = np.array(list(found.values()))
    if not of_trees.max(axis=1).min():
        return None  # links without a limit join all
    parts = _shortest(of_trees)
    if of_trees.max(axis=1).min() < _LEAST_GAIN * (parts @ of_trees).max():
        return None
    # Slices pass in this order: the first is the one that would take longest alone, since some link of it must work all the time.
    in_turn = sorted(zip(found.items(), parts, strict=True), key=lambda slice_: -float(slice_[1] * slice_[0][1].max()))
    trees = [Tree(edges, _center(edges), round(_WHOLE * float(part))) for (edges, _), part in in_turn]
    chosen = tuple(tree for tree in trees if tree.weight)
    return Pattern(ring(range(num_members)).groups, trees=chosen) if len(chosen) > 1 else None


def _shortest(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    # Least T such that no link has more than T of the slices' loads, by tree and link.
    num_trees, num_links = loads.shape
    rows = np.hstack([loads.T / loads.max(), np.full((num_links, 1), -1.0)])
    goal = np.array([*np.zeros(num_trees), 1.0])
    found = linprog(goal, A_ub=rows, b_ub=np.zeros(num_links), A_eq=[[*np.ones(num_trees), 0.0]], b_eq=[1.0])
    parts: NDArray[np.float64] = found.x[:-1]
    return parts


def _center(edges: Sequence[Edge]) -> int:
    return min(nx.center(nx.Graph(list(edges))))
