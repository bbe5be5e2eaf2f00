"""Published planners to compare with, after the papers' formulas and the authors' published code.

As in the originals, PipeDream and DAPPLE assume equal devices and one bandwidth within and one between nodes; Metis knows speeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations

import numpy as np

from raypipe.artifacts.cut import Cut
from raypipe.planning.device_order import recursive
from raypipe.planning.estimator import Estimator
from raypipe.planning.layout import Layout
from raypipe.planning.levels import dealt, node_pipelines, nodes_of
from raypipe.planning.partition import Partition
from raypipe.planning.problem import Devices, Floats, Problem

_MOST_PERMUTATIONS = 120


def data_parallel(estimator: Estimator) -> Iterator[Layout]:
    """Yield the whole model on the most powerful devices, at most one per row of a microbatch."""
    problem = estimator.problem
    by_power = sorted(range(problem.num_devices), key=lambda device: -problem.powers[device])
    group = tuple(sorted(by_power[: problem.microbatch_size]))
    yield Layout((0, problem.num_layers), (group,), "gpipe")
    yield Layout((0, problem.num_layers), (group,), "1f1b")


def overlapped_data_parallel(estimator: Estimator) -> Iterator[Layout]:
    """Yield the whole model on all devices, on the most powerful half, quarter and so on, and on each kind of node's devices alone.

    Sums of gradients overlap the last backward in buckets, as in PyTorch's DistributedDataParallel (Li et al., VLDB 2020).
    """
    problem = estimator.problem
    by_power = sorted(range(problem.num_devices), key=lambda device: (-problem.powers[device], device))
    count = min(problem.num_devices, problem.microbatch_size)
    groups = []
    while count:
        groups.append(tuple(sorted(by_power[:count])))
        count //= 2
    groups += [devices[: problem.microbatch_size] for devices in nodes_of(problem)]
    for group in dict.fromkeys(groups):
        yield Layout((0, problem.num_layers), (group,), "1f1b")


def node_pipeline(estimator: Estimator) -> Iterator[Layout]:
    """Yield pipelines of one node a stage along greedy paths of the best links, with the layers dealt exactly."""
    yield from node_pipelines(estimator, orders=("1f1b", "zb-h2"), divide=False)


def equal_stages(order: str, estimator: Estimator) -> Iterator[Layout]:
    """Yield equally many layers on each device, in topology order."""
    problem = estimator.problem
    num_stages = min(problem.num_devices, problem.num_layers)
    sizes = [len(layers) for layers in Cut.equal(problem.num_layers, num_stages, ()).stages]
    cuts = tuple(int(cut) for cut in np.concatenate(([0], np.cumsum(sizes))))
    yield Layout(cuts, tuple((device,) for device in range(num_stages)), order)


def spp(estimator: Estimator) -> Iterator[Layout]:
    """Yield the layouts of SPP as reconstructed: RDO, PRM, PE (Luo et al., INFOCOM 2022, arXiv 2204.10562)."""
    partition = Partition(estimator, recursive(estimator.problem), most_positions=estimator.problem.num_layers + 1)
    for plan in partition.least_bottleneck("list"):
        yield plan.layout
    # Where memory is short for that many activations in flight: the same with as many as 1F1B's first stage has.
    for plan in partition.least_bottleneck("1f1b"):
        yield replace(plan.layout, order="list", max_in_flight=plan.layout.num_stages)


@dataclass(frozen=True)
class _Uniform:
    """Equal devices, one bandwidth within nodes and one between them."""

    problem: Problem

    @cached_property
    def work_s(self) -> Floats:
        """Seconds of a microbatch by [first layer, end], on a device of mean power."""
        problem = self.problem
        prefix = problem.prefix_s.sum(axis=1)[list(problem.kind_of)].mean(axis=0) / float(np.mean(problem.speeds))
        work_s: Floats = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
        return work_s

    @cached_property
    def parameter_bytes(self) -> Floats:
        """By [first layer, end]."""
        prefix = self.problem.trained_prefix
        return np.maximum(prefix[None, :] - prefix[:, None], 0.0)

    @cached_property
    def nodes(self) -> list[Devices]:
        return nodes_of(self.problem)

    def bandwidth(self, *, within: bool) -> float:
        problem = self.problem
        same = np.equal.outer(problem.node_of, problem.node_of)
        others = ~np.eye(problem.num_devices, dtype=bool)
        for pairs in ((same if within else ~same) & others, others):
            bandwidths = problem.bandwidth[pairs & problem.joined]
            if bandwidths.size:
                return float(bandwidths.mean())
        return math.inf


def pipedream(estimator: Estimator) -> Iterator[Layout]:
    """Yield the layout of PipeDream's planner (Narayanan et al., SOSP 2019, arXiv 1806.03377), with a flush.

    Gradients, there summed per microbatch, are summed per update. Nodes of unequal size count as one level of bandwidth.
    """
    problem = estimator.problem
    uniform = _Uniform(problem)
    sizes = {len(devices) for devices in uniform.nodes}
    two_levels = len(sizes) == 1 and len(uniform.nodes) > 1 and sizes != {1}
    nodes = uniform.nodes if two_levels else [list(range(problem.num_devices))]
    inner = _PipeDreamLevel(uniform, uniform.work_s, len(nodes[0]), uniform.bandwidth(within=two_levels or len(uniform.nodes) == 1))
    spans = [(0, problem.num_layers, 1)]
    if two_levels:
        spans = _PipeDreamLevel(uniform, inner.best_s, len(nodes), uniform.bandwidth(within=False)).stages(0, problem.num_layers)
    cuts, workers, next_node = [0], [], 0
    for first, end, num_nodes in spans:
        next_device = 0
        for _, inner_end, count in inner.stages(first, end):
            cuts.append(inner_end)
            of_nodes = nodes[next_node : next_node + num_nodes]
            workers.append(tuple(device for devices in of_nodes for device in devices[next_device : next_device + count]))
            next_device += count
        next_node += num_nodes
    if all(problem.rows(group) for group in workers):
        yield Layout(tuple(cuts), tuple(workers), "1f1b")


class _PipeDreamLevel:
    """Best partitions of every range of layers onto all devices of one level."""

    def __init__(self, uniform: _Uniform, compute_s: Floats, num_devices: int, bandwidth: float) -> None:
        self.size = compute_s.shape[0]
        self.num_devices = num_devices
        output_bytes = uniform.problem.crossing_bytes
        counts = np.arange(1, num_devices + 1)[:, None, None]
        sums_s = 4 * (counts - 1) / counts * uniform.parameter_bytes[None] / bandwidth / uniform.problem.num_microbatches
        self.single_s = (compute_s[None] + sums_s) / counts
        self.single_s[:, np.tril(np.ones((self.size, self.size), dtype=bool))] = math.inf
        self.single_s[counts[:, 0, 0] > uniform.problem.microbatch_size] = math.inf
        self.transfer_s = 2 * output_bytes[None, :] / bandwidth / counts[:, 0]
        self._row = lru_cache(maxsize=None)(self._solve)

    @property
    def best_s(self) -> Floats:
        """Seconds of the busiest stage by [first layer, end]."""
        best_s = np.full((self.size, self.size), math.inf)
        for first in range(self.size - 1):
            best_s[first] = self._row(first)[0][-1]
        return best_s

    def _solve(self, first: int) -> tuple[Floats, dict[tuple[int, int], tuple[int, int]]]:
        """Return best[m - 1, end] for the layers from `first` on, and the last split (position, devices behind it)."""
        best = self.single_s[:, first, :].copy()
        splits: dict[tuple[int, int], tuple[int, int]] = {}
        for count in range(2, self.num_devices + 1):
            for end in range(first + 2, self.size):
                last = np.arange(1, count)[:, None]  # Devices of the last stage.
                cut = np.arange(first + 1, end)[None, :]
                ways = np.maximum(best[count - last - 1, cut], self.single_s[last - 1, cut, end])
                ways = np.maximum(ways, self.transfer_s[last - 1, cut])
                at = int(ways.argmin())
                value = float(ways.reshape(-1)[at])
                if value < best[count - 1, end]:
                    best[count - 1, end] = value
                    splits[count, end] = (first + 1 + at % ways.shape[1], 1 + at // ways.shape[1])
        return best, splits

    def stages(self, first: int, end: int) -> list[tuple[int, int, int]]:
        _, splits = self._row(first)
        stages: list[tuple[int, int, int]] = []
        count = self.num_devices
        while split := splits.get((count, end)):
            cut, last = split
            stages.append((cut, end, last))
            count, end = count - last, cut
        return [(first, end, count), *reversed(stages)]


def dapple(estimator: Estimator) -> Iterator[Layout]:
    """Yield the layout of DAPPLE's planner (Fan et al., PPoPP 2021, arXiv 2007.01045).

    Of the least-bottleneck plans for each number of stages, the one with the shortest pipeline latency wins.
    """
    problem = estimator.problem
    uniform = _Uniform(problem)
    planner = _Dapple(problem, uniform, uniform.bandwidth(within=True), uniform.bandwidth(within=False))
    most = min(problem.num_devices, problem.num_layers, _Dapple.MOST_STAGES)
    layouts = [layout for num_stages in range(1, most + 1) if (layout := planner.layout(num_stages)) is not None]
    if layouts:
        yield min(layouts, key=planner.latency_s)


class _Dapple:
    """Dynamic program over (stages left, devices taken of each node)."""

    MOST_STAGES = 8

    def __init__(self, problem: Problem, uniform: _Uniform, within: float, between: float) -> None:
        self.problem, self.uniform = problem, uniform
        self.within, self.between = within, between
        self.rest_s = lru_cache(maxsize=None)(self._rest_s)
        self.shared_s = lru_cache(maxsize=None)(self._shared_s)

    def _shared_s(self, count: int) -> Floats:
        """Return the seconds of a stage on so many devices by [first layer, end]; infinite without a layer."""
        shared_s = self.uniform.work_s / count
        shared_s[np.tri(len(shared_s), dtype=bool)] = math.inf
        return shared_s

    def _take(self, taken: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
        nodes = self.uniform.nodes
        free = [len(devices) - used for devices, used in zip(nodes, taken, strict=True)]
        if sum(free) < count:
            return
        numbers = range(len(nodes))
        fresh = sorted(numbers, key=lambda node: (taken[node] > 0, node))
        append = sorted(numbers, key=lambda node: (taken[node] == 0, node))
        choices = []
        for order in (fresh, append):
            left, more = count, [0] * len(nodes)
            for node in order:
                more[node] = min(left, free[node])
                left -= more[node]
            choices.append(tuple(more))
        scattered, left = [0] * len(nodes), count
        while left:
            for node in numbers:
                if left and scattered[node] < free[node]:
                    scattered[node] += 1
                    left -= 1
        choices.append(tuple(scattered))
        yield from dict.fromkeys(choices)

    def best_s(self, num_stages: int, taken: tuple[int, ...]) -> Floats:
        """Return the seconds of the busiest of so many stages, by their first layer.

        Devices count as equal: only how many are taken of how many nodes matters.
        """
        return self.rest_s(num_stages, tuple(sorted(zip(map(len, self.uniform.nodes), taken, strict=True))))

    def _rest_s(self, num_stages: int, of_nodes: tuple[tuple[int, int], ...]) -> Floats:
        left = list(of_nodes)
        taken = []
        for devices in self.uniform.nodes:
            at = next(number for number, (size, _) in enumerate(left) if size == len(devices))
            taken.append(left.pop(at)[1])
        return self.solve(num_stages, tuple(taken))[0]

    def solve(self, num_stages: int, taken: tuple[int, ...]) -> tuple[Floats, Callable[[int], tuple[int, tuple[int, ...]]]]:
        """Return the seconds as `best_s`, and a function of a first layer: its stage's end, and the devices taken for it."""
        problem, size = self.problem, self.problem.num_layers + 1
        firsts, ends, numbers = np.arange(size), np.zeros(size, dtype=int), np.zeros(size, dtype=int)
        best = np.full(size, math.inf)
        tried: list[tuple[int, ...]] = []
        available = problem.num_devices - sum(taken)
        for count in range(1, min(available - num_stages + 1, problem.microbatch_size) + 1):
            for more in self._take(taken, count):
                rest = np.full(size, math.inf)
                if num_stages == 1:
                    rest[-1] = 0.0
                else:
                    behind = tuple(map(sum, zip(taken, more, strict=True)))
                    crosses = self.between if len(self.uniform.nodes) > 1 else self.within
                    rest = np.maximum(self.best_s(num_stages - 1, behind), 2 * problem.crossing_bytes / crosses / count)
                ways = np.maximum(self.shared_s(count), rest)
                least = ways.argmin(axis=1)
                values = ways[firsts, least]
                better = values < best
                best[better], ends[better], numbers[better] = values[better], least[better], len(tried)
                tried.append(more)
        return best, lambda first: (int(ends[first]), tried[numbers[first]])

    def layout(self, num_stages: int) -> Layout | None:
        taken = (0,) * len(self.uniform.nodes)
        if not math.isfinite(self.best_s(num_stages, taken)[0]):
            return None
        cuts, workers = [0], []
        for left in range(num_stages, 0, -1):
            end, more = self.solve(left, taken)[1](cuts[-1])
            cuts.append(end)
            workers.append(
                tuple(
                    device
                    for devices, used, count in zip(self.uniform.nodes, taken, more, strict=True)
                    for device in devices[used : used + count]
                )
            )
            taken = tuple(map(sum, zip(taken, more, strict=True)))
        return Layout(tuple(cuts), tuple(workers), "1f1b")

    def latency_s(self, layout: Layout) -> float:
        num_microbatches = self.problem.num_microbatches
        stages, transfers, sums = [], [], []
        for stage, group in enumerate(layout.workers):
            first, end = layout.cuts[stage], layout.cuts[stage + 1]
            stages.append(float(self.uniform.work_s[first, end]) / len(group))
            spread = len({self.problem.node_of[device] for device in group}) > 1
            bandwidth = self.between if spread else self.within
            sums.append(2 * (len(group) - 1) / len(group) * float(self.uniform.parameter_bytes[first, end]) / bandwidth)
            if stage:
                transfers.append(2 * float(self.problem.crossing_bytes[first]) / self.between / len(layout.workers[stage - 1]))
        block_s = max([*stages, *transfers])
        late_s = max(sum_s - stage * block_s for stage, sum_s in enumerate(sums))
        return block_s * (num_microbatches - 1) + math.fsum(stages) + math.fsum(transfers) + max(late_s, 0.0)


def metis(estimator: Estimator) -> Iterator[Layout]:
    """Yield the layout of a planner for unequal devices in the manner of Metis (Um et al., USENIX ATC 2024).

    It tries equal groups in every order of node kinds, and ranks by bottleneck and path.
    """
    problem = estimator.problem
    uniform = _Uniform(problem)
    within, between = uniform.bandwidth(within=True), uniform.bandwidth(within=False)
    candidates: list[tuple[float, Layout]] = []
    for order in _node_orders(problem, uniform):
        for size in range(1, min(problem.num_devices, problem.microbatch_size) + 1):
            num_stages, left = divmod(problem.num_devices, size)
            if left or num_stages > problem.num_layers:
                continue
            workers = tuple(order[start : start + size] for start in range(0, problem.num_devices, size))
            cuts = dealt(estimator, workers, hops=False)
            update_s = math.inf if cuts is None else _metis_s(estimator, workers, cuts, within, between)
            if cuts is not None and math.isfinite(update_s):
                candidates.append((update_s, Layout(cuts, workers, "1f1b")))
    if candidates:
        yield min(candidates, key=lambda candidate: candidate[0])[1]


def _node_orders(problem: Problem, uniform: _Uniform) -> Iterator[Devices]:
    kinds: dict[tuple[float, ...], list[Devices]] = {}
    for devices in uniform.nodes:
        kinds.setdefault(tuple(problem.powers[device] for device in devices), []).append(devices)
    for number, order in enumerate(permutations(kinds)):
        if number == _MOST_PERMUTATIONS:
            return
        yield tuple(device for kind in order for devices in kinds[kind] for device in devices)


def _metis_s(estimator: Estimator, workers: Sequence[Devices], cuts: Sequence[int], within: float, between: float) -> float:
    problem = estimator.problem
    stages, sums, transfers = [], [0.0], [0.0]
    for stage, group in enumerate(workers):
        first, end = cuts[stage], cuts[stage + 1]
        stages.append(sum(estimator.stage(group, first, end)[:2]))
        bandwidth = between if len({problem.node_of[device] for device in group}) > 1 else within
        num_bytes = float(problem.trained_prefix[end] - problem.trained_prefix[first])
        sums.append(2 * (len(group) - 1) / len(group) * num_bytes / bandwidth)
        if stage:
            crosses = problem.node_of[workers[stage - 1][-1]] != problem.node_of[group[0]]
            transfers.append(2 * float(problem.crossing_bytes[first]) / (between if crosses else within) / len(group))
    return max([*stages, *transfers]) * (problem.num_microbatches - 1) + math.fsum(stages) + math.fsum(transfers) + max(sums)
