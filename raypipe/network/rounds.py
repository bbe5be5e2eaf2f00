"""Rounds of measurements in which no node sends to two others, nor receives from two: matchings, one direction at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
"""Two nodes by number; of a directed pair, the sender first."""

Round = tuple[Pair, ...]
"""Directed pairs that are measured at the same time."""

MOST_ALL_PAIRS = 24
"""Nodes up to which every directed pair is measured; of more, a sample."""

_PER_CLASS = 2
_MOST_REPRESENTATIVES = 16


def matchings(num_nodes: int) -> list[tuple[Pair, ...]]:
    """Return rounds of pairs, lower number first, in which every two nodes meet once (circle method; Kirkman, 1847)."""
    if num_nodes < 2:
        return []
    players: list[int | None] = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    rounds: list[tuple[Pair, ...]] = []
    for _ in range(len(players) - 1):
        pairs = zip(players, reversed(players[len(players) // 2 :]), strict=False)
        rounds.append(tuple(sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)))
        players.insert(1, players.pop())
    return rounds


def directed(matching: Sequence[Pair]) -> tuple[Round, Round]:
    """Return the two rounds of a matching, one per direction."""
    return tuple(matching), tuple((b, a) for a, b in matching)


def paired_rounds(matching: Sequence[Pair]) -> list[Round]:
    """Return 2 (1 + log2 m) rounds in which every two of m pairs run in the same direction and against each other."""
    patterns = [[False] * len(matching)]
    patterns += [[bool(place >> bit & 1) for place in range(len(matching))] for bit in range((len(matching) - 1).bit_length())]
    rounds: list[Round] = []
    for pattern in patterns:
        forth = tuple((b, a) if turned else (a, b) for (a, b), turned in zip(matching, pattern, strict=True))
        rounds += [forth, tuple((b, a) for a, b in forth)]
    return rounds


def hypercube(num_nodes: int) -> list[tuple[Pair, ...]]:
    """Return log2 n matchings that join all nodes: in the k-th, numbers that differ in bit k meet."""
    return [
        tuple((node, node | 1 << bit) for node in range(num_nodes) if not node >> bit & 1 and node | 1 << bit < num_nodes)
        for bit in range((num_nodes - 1).bit_length())
    ]


def representatives(classes: Sequence[Hashable]) -> list[int]:
    """Return two nodes of each class, the first node among them, at most 16 in all."""
    seen: dict[Hashable, int] = {}
    chosen: list[int] = []
    for node, kind in enumerate(classes):
        if seen.get(kind, 0) < _PER_CLASS and len(chosen) < _MOST_REPRESENTATIVES:
            chosen.append(node)
            seen[kind] = seen.get(kind, 0) + 1
    return chosen


def tournament(classes: Sequence[Hashable]) -> list[tuple[Pair, ...]]:
    """Return the matchings that are measured.

    Beyond `MOST_ALL_PAIRS` nodes, representatives of each class meet, and all nodes in log2 n matchings that join them.
    """
    if len(classes) <= MOST_ALL_PAIRS:
        return matchings(len(classes))
    chosen = representatives(classes)
    met: set[Pair] = set()
    measured: list[tuple[Pair, ...]] = []
    rounds = [tuple((chosen[a], chosen[b]) for a, b in matching) for matching in matchings(len(chosen))]
    for matching in (*rounds, *hypercube(len(classes))):
        fresh = tuple(pair for pair in matching if pair not in met)
        met.update(fresh)
        if fresh:
            measured.append(fresh)
    return measured


@dataclass(frozen=True)
class NumRounds:
    """Numbers of rounds: for single pairs, for pairs that slow each other, for all at one node."""

    tournament: int
    paired: int
    one_to_all: int

    @property
    def total(self) -> int:
        """Return the number of all rounds."""
        return self.tournament + self.paired + self.one_to_all


def all_paired_rounds(met: Sequence[tuple[Pair, ...]], num_nodes: int) -> list[Round]:
    """Return the rounds for pairs that slow each other: of all matchings, or of those that join many nodes."""
    if num_nodes < 3:
        return []
    chosen = met if num_nodes <= MOST_ALL_PAIRS else [matching for matching in met if len(matching) >= num_nodes // 4]
    return [pairs for matching in chosen for pairs in paired_rounds(matching)]


def one_to_all_rounds(num_nodes: int) -> list[Round]:
    """Return 2 n rounds: all that leaves a node at once, then all that enters one; none where not all pairs are measured."""
    nodes = range(num_nodes if 3 <= num_nodes <= MOST_ALL_PAIRS else 0)
    leaving = [tuple((node, other) for other in nodes if other != node) for node in nodes]
    return leaving + [tuple(pair[::-1] for pair in pairs) for pairs in leaving]


def num_rounds(classes: Sequence[Hashable]) -> NumRounds:
    """Return the numbers of rounds of a cluster, without closer looks."""
    met = tournament(classes)
    return NumRounds(2 * len(met), len(all_paired_rounds(met, len(classes))), len(one_to_all_rounds(len(classes))))
