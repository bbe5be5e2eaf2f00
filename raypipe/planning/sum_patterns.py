"""The pattern of each sum of a run: chosen when the run begins, and chosen anew between windows as its links change.

divided   sums of copies that divide an optimizer's state keep their pattern
exact     a run whose sums must keep their bits changes between a ring and the direct exchange that adds in its order, no more
gain      another pattern must be predicted quicker by `LEAST_GAIN`
twice     unless the gain is large, two consecutive windows must say so
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from raypipe.artifacts.topology import ClusterTopology, Path
from raypipe.communication.patterns import MOST_MESHED, Pattern
from raypipe.schedules.collectives import Start
from raypipe.schedules.lower import DeviceProgram
from raypipe.simulation.cost import Cost
from raypipe.simulation.pattern_choice import best_pattern, sum_time

Members = tuple[int, ...]
"""The devices of a sum, by number."""

LEAST_GAIN = 1.1
SURE_GAIN = 1.25
"""Gain for which one window is enough."""


@dataclass(frozen=True)
class PatternDecision:
    """Decision on the pattern of some members' sums after a window.

    Attributes:
        pattern: Pattern of the next window.
        changes: Whether it is another one than before.
        gain: Predicted seconds of a sum by the pattern before, over those by the best other one.
    """

    members: Members
    pattern: Pattern
    changes: bool
    gain: float
    text: str


class SumPatterns:
    """Patterns of the sums of a plan's devices.

    Args:
        cost: Of the plan, when the run begins.
        programs: Of the plan.
        exact: Whether no change may change a bit of a sum.

    Attributes:
        patterns: Pattern of all sums of the same members; chosen for the largest of them. Of members that exchange only norms, the tree
            where some of them cannot communicate.
    """

    def __init__(self, cost: Cost, programs: Iterable[DeviceProgram], *, exact: bool) -> None:
        collectives = dict.fromkeys(item.collective for program in programs for item in program.items if isinstance(item, Start))
        largest = cost.largest_sums(collectives)
        self.patterns = {**cost.with_patterns(collectives).patterns, **cost.trees(collectives)}
        self.exact = exact
        # Who owns which weights goes by the pattern with which a run begins: with another one, sums would go further to their owners.
        divided = {collective.devices for collective in collectives if collective.owners}
        self._num_bytes = {members: cost.collective_bytes(largest[members]) for members in largest if members not in divided}
        self._devices = cost.devices
        self._pending: set[Members] = set()

    def after_window(self, topology: ClusterTopology) -> list[PatternDecision]:
        """Choose again for the links as they are now; return what is decided, nothing for sums whose pattern is still the best."""
        decisions = [
            decision
            for members, num_bytes in self._num_bytes.items()
            if 2 < len(members) <= MOST_MESHED and (decision := self._decided(members, num_bytes, topology)) is not None
        ]
        self.patterns |= {decision.members: decision.pattern for decision in decisions}
        return decisions

    def _links(self, members: Members, topology: ClusterTopology) -> tuple[list[Hashable], Callable[[int, int], Path]]:
        names = [self._devices[member] for member in members]
        return [topology.node_of(name).name for name in names], lambda source, target: topology.reach(names[source], names[target])

    def _decided(self, members: Members, num_bytes: int, topology: ClusterTopology) -> PatternDecision | None:
        nodes, path = self._links(members, topology)
        now = self.patterns[members]
        if not now.is_meshed:
            return None  # Its members are connected along the tree alone.

        def seconds(pattern: Pattern) -> float:
            return sum_time(pattern, nodes, path).seconds(num_bytes)

        best = min(now.with_same_bits, key=seconds) if self.exact else best_pattern(nodes, path, num_bytes)
        now_s, best_s = seconds(now), seconds(best)
        gain = now_s / best_s if best_s else 1.0
        if best == now or gain < LEAST_GAIN:
            self._pending.discard(members)
            return None
        devices = ", ".join(self._devices[member] for member in members)
        text = f"sums of {devices}: {now} -> {best}, as their links are now; predicted {now_s:.3g} -> {best_s:.3g} s"
        if gain < SURE_GAIN and members not in self._pending:
            self._pending.add(members)
            return PatternDecision(members, now, changes=False, gain=gain, text=f"stays for one more window: {text}")
        self._pending.discard(members)
        return PatternDecision(members, best, changes=True, gain=gain, text=text)
