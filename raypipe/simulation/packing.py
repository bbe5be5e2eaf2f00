"""Sums along several trees at once, each slice as long as the links of its tree are good, so that all links work until the end.

A tree carries its slice once each way over each of its links: shares towards the root, totals away from it. How long slices are best is a
linear program over trees (Blink, Wang et al., MLSys 2020; the packing of spanning trees). Of all trees those count that are the cheapest,
in turn, at prices that rise with what the trees so far put on each link (multiplicative weights, Garg and Koenemann, SIAM J. Comput. 2007).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from raypipe.communication.paths import PathOf
from raypipe.communication.patterns import Pattern, Tree, ring

Edge = tuple[int, int]
Floats = NDArray[np.float64]
_NUM_TREES = 40
"""That are tried at most. For 8 members the best slices along them are within 1 % of those along all trees, for 12 within 4 %."""
_NUM_KNOWN = 6
"""Cheapest trees in a row that are known already, after which no more are tried."""
_STEEPNESS = 3.0
"""How fast prices rise; with 8 the best of the same number of trees is as good."""
_LEAST_GAIN = 1.05
"""How much quicker several trees must be than one."""
_WHOLE = 1024
"""Into how many parts numbers are divided among slices."""


class _Links:
    """What a slice puts on each limited link, in seconds per byte, for each pair of members that it passes between."""

    def __init__(self, num_members: int, path: PathOf) -> None:
        self.num_members = num_members
        self.pairs = list(itertools.combinations(range(num_members), 2))
        self.number_of = {pair: number for number, pair in enumerate(self.pairs)}
        link_of: dict[str, int] = {}
        entries: list[tuple[int, int, float]] = []
        by_port: dict[str, float] = {}
        for ends in itertools.permutations(range(num_members), 2):
            between = path(*ends)
            name = f"{ends[0]} by {between.port}"
            by_port[name] = max(by_port.get(name, 0.0), between.bandwidth_bytes_per_s)
        for number, pair in enumerate(self.pairs):
            for source, target in (pair, pair[::-1]):
                between = path(source, target)
                port = [] if between.port is None else [(name := f"{source} by {between.port}", by_port[name])]
                for name, bandwidth in (*between.resources, *port):
                    entries.append((number, link_of.setdefault(name, len(link_of)), 1 / bandwidth))
        self.seconds = np.zeros((len(self.pairs), len(link_of)))
        for number, link, seconds in entries:
            self.seconds[number, link] += seconds

    def cheapest(self, prices: Floats) -> tuple[Edge, ...]:
        """Return the edges of the tree that costs the least (Kruskal's algorithm; for so few members SciPy's checks take far longer)."""
        part_of = list(range(self.num_members))
        edges: list[Edge] = []
        for number in np.argsort(self.seconds @ prices, kind="stable").tolist():
            one, other = (part_of[end] for end in self.pairs[number])
            if one != other:
                edges.append(self.pairs[number])
                if len(edges) == self.num_members - 1:
                    break
                part_of = [one if part == other else part for part in part_of]
        return tuple(sorted(edges))

    def loads(self, edges: Sequence[Edge]) -> Floats:
        """Return what a tree puts on each link."""
        of_tree: Floats = self.seconds[[self.number_of[edge] for edge in edges]].sum(axis=0)
        return of_tree


def packed(num_members: int, path: PathOf, at_most_s: float = math.inf) -> Pattern | None:
    """Return the pattern whose slices go along several trees so that the busiest link is done soonest.

    `None` where one tree will do, or where no trees take at most `at_most_s` seconds for each byte: the busiest link takes at least the
    mean of all links, weighed by any prices, hence what the cheapest tree costs over the sum of the prices.
    """
    links = _Links(num_members, path)
    loads = np.zeros(links.seconds.shape[1])
    loads_of: dict[tuple[Edge, ...], Floats] = {}
    num_known = 0
    for count in range(1, _NUM_TREES + 1):
        highest = loads.max(initial=0.0)
        prices = np.exp(_STEEPNESS * np.log(count) * (loads / highest - 1)) if highest else np.ones_like(loads)
        edges = links.cheapest(prices)
        num_known = num_known + 1 if edges in loads_of else 0
        if num_known == _NUM_KNOWN:
            break
        if not num_known:
            loads_of[edges] = links.loads(edges)
        if prices @ loads_of[edges] > at_most_s * prices.sum():
            return None
        loads += loads_of[edges]
    of_trees = np.array(list(loads_of.values()))
    one_s = of_trees.max(axis=1, initial=0.0).min()
    if not one_s:
        return None  # links without a limit join all
    parts = _shortest(of_trees)
    many_s = (parts @ of_trees).max()
    if many_s > min(one_s / _LEAST_GAIN, at_most_s):
        return None
    # The slice that would take longest alone comes first, since some link of it must work all the time.
    weights = np.rint(_WHOLE * parts).astype(int).tolist()
    alone_s = (parts * of_trees.max(axis=1)).tolist()
    slices = sorted(zip(alone_s, loads_of, weights, strict=True), key=lambda each: -each[0])
    trees = tuple(Tree(edges, _center(edges), weight) for _, edges, weight in slices if weight)
    return Pattern(ring(range(num_members)).groups, trees=trees) if len(trees) > 1 else None


def _shortest(loads: Floats) -> Floats:
    # Least T such that no link has more than T of the slices' loads, by tree and link.
    num_trees, num_links = loads.shape
    rows = np.hstack([loads.T / loads.max(), np.full((num_links, 1), -1.0)])
    goal = np.array([*np.zeros(num_trees), 1.0])
    solved = linprog(goal, A_ub=rows, b_ub=np.zeros(num_links), A_eq=[[*np.ones(num_trees), 0.0]], b_eq=[1.0])
    assert solved.success, f"any division of the numbers is a solution: {solved.message}"
    parts: Floats = solved.x[:-1]
    return parts


def _center(edges: Sequence[Edge]) -> int:
    """Return the member from which the way to any other one is the shortest, the first of two."""
    tree = Tree(tuple(edges))
    end = tree.outwards(edges[0][0])[-1].target  # Of those farthest away, which come last.
    hops = tree.outwards(end)
    before = {hop.target: hop.source for hop in hops}
    longest = [hops[-1].target]
    while longest[-1] != end:
        longest.append(before[longest[-1]])
    return min(longest[(len(longest) - 1) // 2], longest[len(longest) // 2])
