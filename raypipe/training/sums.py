"""The patterns of a run's sums: as the links are when it begins, and as they are between windows."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cluster.coordinator import Coordinator, Programs
from raypipe.communication.ways import Wiring
from raypipe.network.estimate import NetworkEstimate
from raypipe.planning.sum_patterns import SumPatterns
from raypipe.simulation.plan_cost import plan_cost, plan_wiring
from raypipe.training.record import RunRecord
from raypipe.training.strategy import Strategy

_LOG = logging.getLogger("raypipe.training.sums")


class SumAdaptation:
    """Lets the sums of a run go another way between two windows."""

    def __init__(self, strategy: Strategy, coordinator: Coordinator, record: RunRecord, *, exact: bool) -> None:
        self.strategy = strategy
        self.coordinator = coordinator
        self.record = record
        self.exact = exact
        self._sums: SumPatterns

    def begin(self, programs: Programs) -> Wiring:
        """Return how what the programs of the strategy's plan send begins to go."""
        plan = self.strategy.plan
        of_devices = list(itertools.chain(*programs.values()))
        self._sums = SumPatterns(plan_cost(plan), of_devices, exact=self.exact)
        return plan_wiring(plan, of_devices, self._sums.patterns)

    def after_window(self, *, update: int) -> None:
        """Choose again after a window."""
        if not self.coordinator.sums_by_pattern:
            return
        plan, slots = self.strategy.plan, self.coordinator.actors.members
        topology = links_now(plan, [member.slot.node.address for member in slots], self.coordinator.links.estimate)
        decisions = self._sums.after_window(topology) if topology is not None else []
        for decision in decisions:
            _LOG.info("update %d: %s", update, decision.text)
            self.record.add_pattern_decision(update, decision)
        if changed := {decision.members: decision.pattern for decision in decisions if decision.changes}:
            self.coordinator.use_patterns(changed)


def links_now(plan: Plan, addresses: Sequence[str], estimate: NetworkEstimate) -> ClusterTopology | None:
    """Return a plan's topology with what is known of the links now; `addresses` are those of its devices' nodes.

    A link between nodes that nothing has passed yet, and that was not probed, is taken to be as quick as the quickest that is known.
    `None` if the nodes of the topology are not those of the cluster.
    """
    topology = plan.topology
    nodes = {(address, topology.node_of(device).name) for address, device in zip(addresses, plan.devices, strict=True)}
    if not len(nodes) == len({address for address, _ in nodes}) == len({name for _, name in nodes}):
        return None
    known = [link.bandwidth_bytes_per_s for link in estimate.links.values() if link.bandwidth_bytes_per_s is not None]
    if known and topology.default_link is not None:
        most = min(max(known), topology.default_link.bandwidth_bytes_per_s or max(known))
        topology = replace(topology, default_link=replace(topology.default_link, bandwidth_bytes_per_s=most))
    return estimate.snapshot(topology, names=dict(nodes))
