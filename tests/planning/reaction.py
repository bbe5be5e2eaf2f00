"""How a run reacts to links that change, window by window on a simulated cluster whose figures are noisy; for tests and benchmarks."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, node_ports
from raypipe.communication.patterns import Pattern
from raypipe.network.estimate import NetworkEstimate, Transfer
from raypipe.planning.choices import Choice
from raypipe.planning.cluster_state import ClusterState
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout_schedules import ScheduleCache
from raypipe.planning.problem import Problem
from raypipe.planning.replanning import ConcurrencyPolicy, Decision
from raypipe.planning.solve import solve
from raypipe.planning.sum_patterns import PatternDecision, SumPatterns
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.lower import Placement, lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost, StageCost
from raypipe.simulation.pattern_choice import candidates
from raypipe.simulation.simulator import time_order

NODES = tuple(f"n{number}" for number in range(4))
DEVICES = tuple(f"{name}/0" for name in NODES)
PORT = 25e6
"""Bytes per second that leave a node, and that enter it."""
LATENCY_S = 4e-4
CHUNK_BYTES = 400_000
CHUNKS = 12
"""Of a window over each link that carries something."""
NOISE = 0.10
STALLS = 0.03
"""Of the chunks, those that take three times as long. All of these are at or above what `benchmarks/adaptation.py` finds."""
TIMES_NOISE = 0.03
UPDATE_NOISE = 0.04
PROFILE = ModelProfile.uniform(8, forward_s=0.008, backward_s=0.016, output_bytes=100_000, parameter_bytes=600_000, microbatch_size=2)


def ports(fallen: Mapping[int, float] | None = None, *, wires: Mapping[tuple[int, int], float] | None = None) -> ClusterTopology:
    """Four nodes with one port each, some of them at a part of their rate, and some wires at a part of a port's."""
    shared = node_ports({name: PORT * (fallen or {}).get(number, 1.0) for number, name in enumerate(NODES)})
    return ClusterTopology(
        name="ports",
        nodes=tuple(Node(name=name, devices=(Device(device, "cpu"),)) for name, device in zip(NODES, DEVICES, strict=True)),
        links=tuple(
            Link(source=NODES[a], target=NODES[b], bandwidth_bytes_per_s=PORT * part, latency_s=LATENCY_S, one_way=True)
            for (a, b), part in (wires or {}).items()
        ),
        shared_links=tuple(shared),
        default_link=NodeLink(latency_s=LATENCY_S),
    )


@dataclass
class Watched:
    """What a run knows of a cluster as it really is, through noise."""

    truth: ClusterTopology
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.network = NetworkEstimate(NODES)
        self.network.seed(ports())
        self._at_s = 0.0

    def observe(self, used: Iterable[tuple[int, int]]) -> ClusterTopology:
        """Return what is known of the links after a window in which some of them carried something."""
        used = set(used)
        for a in range(4):
            for b in range(4):
                # Links that nothing uses are probed now and then.
                for _ in range(CHUNKS if (a, b) in used else int(a != b and self.rng.random() < 0.2)):
                    path = self.truth.path(DEVICES[a], DEVICES[b])
                    took_s = path.latency_s + CHUNK_BYTES / path.bandwidth_bytes_per_s
                    took_s *= math.exp(self.rng.gauss(0.0, NOISE)) * (3.0 if self.rng.random() < STALLS else 1.0)
                    self._at_s += 0.01
                    self.network.observe([Transfer(NODES[a], NODES[b], CHUNK_BYTES, took_s, self._at_s)])
        return self.network.snapshot(ports())


@dataclass(frozen=True)
class Reaction:
    """What a run made of a change: seconds of an update.

    Attributes:
        before_s: Before the change.
        fixed_s: Behind it, had the run gone on as before.
        windows_s: Of each window behind the change.
        best_s: Of the best fixed way in hindsight.
        texts: What was decided behind each of the windows, or about each change.
    """

    before_s: float
    fixed_s: float
    windows_s: tuple[float, ...]
    best_s: float
    texts: tuple[str, ...]

    @property
    def gained(self) -> float:
        """The part of what the best fixed way gains that the run gains behind the second window."""
        return (self.fixed_s - max(self.windows_s[2:])) / (self.fixed_s - self.best_s)


WINDOWS_BEFORE = 3
WINDOWS_BEHIND = 6


# A stage on four nodes


_STAGE = ScheduleRequest(1, 4, 4, update_scope=UpdateScope.STAGE)
EVERYBODY = (0, 1, 2, 3)
PROGRAMS = lower(build("1f1b", _STAGE), Placement((tuple((device, 0.25) for device in EVERYBODY),)))
ORDER = CompiledOrder(PROGRAMS)
SUM_BYTES = 2_000_000


def stage_cost(topology: ClusterTopology, pattern: Pattern | None = None) -> Cost:
    """A stage of 60 ms a microbatch whose copies sum 2 MB an update, by a pattern."""
    stage = StageCost(forward_s=0.02, backward_s=0.04, weight_grad_s=0.02, parameter_bytes=SUM_BYTES)
    return Cost(
        devices=DEVICES,
        stages={(device, 0): stage for device in EVERYBODY},
        edge_bytes={},
        path=lambda source, target: topology.path(DEVICES[source], DEVICES[target]),
        nodes=NODES,
        patterns={} if pattern is None else {EVERYBODY: pattern},
    )


def stage_s(topology: ClusterTopology, pattern: Pattern) -> float:
    """Seconds of an update with a pattern, simulated."""
    return time_order(ORDER, stage_cost(topology, pattern)).steady_update_s


@dataclass
class StageRun:
    """A run of the stage on four nodes, whose sums are watched and may go another way."""

    exact: bool
    truth: ClusterTopology = field(default_factory=ports)
    decisions: list[PatternDecision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watched = Watched(self.truth)
        self.sums = SumPatterns(stage_cost(ports()), PROGRAMS, exact=self.exact)

    @property
    def pattern(self) -> Pattern:
        return self.sums.patterns[EVERYBODY]

    def window(self) -> float:
        """Return the seconds of an update of a window; decide behind it."""
        update_s = stage_s(self.truth, self.pattern)
        self.watched.truth = self.truth
        used = {(hop.source, hop.target) for loads in self.pattern.loads for hop in loads}
        self.decisions += self.sums.after_window(self.watched.observe(used))
        return update_s


def best_stage_s(topology: ClusterTopology, *, same_bits_as: Pattern | None = None) -> float:
    """Seconds of the best fixed pattern, or of the best with the bits of one."""
    path = stage_cost(topology).path
    patterns = candidates(NODES, path) if same_bits_as is None else same_bits_as.with_same_bits
    return min(stage_s(topology, pattern) for pattern in patterns)


def wire_falls(*, exact: bool, part: float = 0.1) -> Reaction:
    """A wire between two nodes next to each other in the ring falls to a part of its rate."""
    run = StageRun(exact)
    before_s = max(run.window() for _ in range(WINDOWS_BEFORE))
    begun_with = run.pattern
    run.truth = ports(wires={(1, 2): part})
    windows_s = tuple(run.window() for _ in range(WINDOWS_BEHIND))
    best = best_stage_s(run.truth, same_bits_as=begun_with if exact else None)
    texts = tuple(decision.text for decision in run.decisions if decision.changes)
    return Reaction(before_s, stage_s(run.truth, begun_with), windows_s, best, texts)


# A model on four nodes


_SCHEDULES: defaultdict[int, ScheduleCache] = defaultdict(ScheduleCache)


def problem(topology: ClusterTopology, *, num_microbatches: int = 4, microbatch_size: int = 2) -> Problem:
    return Problem(PROFILE, topology, num_microbatches, microbatch_size, max_staleness=1, max_mismatch=1, updates_per_window=5)


def seconds_of(choice: Choice, topology: ClusterTopology) -> float:
    """Seconds of an update of a choice there, without noise."""
    count = choice.num_microbatches
    found = LayoutEvaluator(problem(topology, num_microbatches=count), _SCHEDULES[count]).simulate(choice.layout)
    assert found is not None
    return found.update_s


def best_s(topology: ClusterTopology) -> float:
    """Seconds of an update of the best fixed plan in hindsight."""
    return solve(LayoutEvaluator(problem(topology))).update_s


@dataclass
class PlanRun:
    """A run of the model that adapts its plan."""

    truth: ClusterTopology = field(default_factory=ports)
    bias: float = 1.04
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = ConcurrencyPolicy(problem(ports()))
        self.policy.choose()
        self.watched = Watched(self.truth)
        self.slowness: dict[str, list[float]] = {}

    def window(self) -> float:
        """Return the seconds of an update of a window; decide behind it."""
        choice, rng = self.policy.choice, self.watched.rng
        update_s = seconds_of(choice, self.truth)
        self.watched.truth = self.truth
        topology = self.watched.observe(_used(choice))
        nodes = []
        for node in topology.nodes:
            seen = self.slowness.setdefault(node.name, [])
            seen.append(math.exp(rng.gauss(0.0, TIMES_NOISE)))
            slowness = sorted(seen[-3:])[len(seen[-3:]) // 2]
            nodes.append(replace(node, devices=(replace(node.devices[0], speed=1 / slowness),)))
        measured_s = update_s * self.bias * math.exp(rng.gauss(0.0, UPDATE_NOISE))
        state = ClusterState(PROFILE, replace(topology, nodes=tuple(nodes)))
        decision = self.policy.after_window(state, update_s=measured_s, updates_left=1000)
        if decision.switch:
            self.policy.adopt(decision.choice, took_s=2.0)
        self.decisions.append(decision)
        return update_s


def _used(choice: Choice) -> set[tuple[int, int]]:
    """Links over which messages or sums go: between neighbors, round the circle, and within workers."""
    groups = choice.layout.workers
    pairs = {(a, b) for at, group in enumerate(groups) for a in group for b in groups[(at + 1) % len(groups)]}
    pairs |= {(a, b) for group in groups for a in group for b in group}
    return {(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a != b}


def port_falls(*, part: float, num_windows: int = WINDOWS_BEHIND) -> tuple[Reaction, PlanRun]:
    """The port of the node whose fall hurts most falls to a part of its rate; return what came of it, and the run for more windows."""
    run = PlanRun()
    before_s = max(run.window() for _ in range(WINDOWS_BEFORE))
    begun_with = run.policy.choice
    node = max(range(4), key=lambda number: seconds_of(begun_with, ports({number: part})))
    run.truth = ports({node: part})
    windows_s = tuple(run.window() for _ in range(num_windows))
    texts = tuple(decision.text for decision in run.decisions[WINDOWS_BEFORE:] if decision.switch)
    return Reaction(before_s, seconds_of(begun_with, run.truth), windows_s, best_s(run.truth), texts), run
