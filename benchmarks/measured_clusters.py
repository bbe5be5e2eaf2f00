"""Training runs that others measured on real GPU clusters, simulated: predicted beside measured, and beside Sailor's own simulator.

    python benchmarks/measured_clusters.py [--data FOLDER] [--runs FILE] [--json FILE]

The runs are Sailor's (`data/measured_clusters`, SOURCE.txt there). Each becomes a plan with the same stages, groups of GPUs and
microbatches in 1F1B, which raypipe lowers and simulates as any other. What was different from raypipe's own actors is part of the plan
and of the cost: gradients are summed behind the last backward, in a ring, and messages block, as in DeepSpeed's pipeline engine.

One constant per cluster is fitted: the share of the measured rates between nodes that messages and sums reach, 1 over a whole number.
Least squares of the relative error on every second run say which, and the others are judged; then the other way round. *share* is that
of the half that a run is not in. Runs of `--runs` are judged with the share that is fitted on all of the folder's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rounds import print_table, write_json

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, Replica
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.communication.patterns import ring
from raypipe.profiling.sailor import GpuNode, SailorData
from raypipe.schedule_registry import build_schedule
from raypipe.schedules.reductions import add_reductions
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.plan_cost import plan_cost, plan_programs
from raypipe.simulation.simulator import Timing, time_order

DATA = Path(__file__).parent / "data" / "measured_clusters"
SHARES = tuple(1 / part for part in range(1, 9))
"""Shares of the measured rates that are tried."""


@dataclass(frozen=True)
class Figures:
    """Seconds of an iteration and of the gradients' sum, and the highest memory of a GPU."""

    iteration_s: float
    gradient_reduction_s: float
    max_memory_bytes: float


def kind_of(group: GpuNode) -> str:
    """The kind of device that a group is."""
    return f"{group.gpu}x{group.num_gpus}"


@dataclass(frozen=True)
class Run:
    """One training run."""

    data: SailorData
    name: str
    model: str
    layers_per_stage: tuple[int, ...]
    groups: tuple[tuple[GpuNode, ...], ...]
    microbatch_size: int
    global_batch_size: int
    measured: Figures
    sailor_s: float | None

    @classmethod
    def of(cls, data: SailorData, run: dict[str, Any]) -> Run:
        """The run that an entry of `runs.json` describes."""
        groups = tuple(tuple(GpuNode(group["gpu"], group["tensor_parallel"], group["zone"]) for group in stage) for stage in run["groups"])
        return cls(
            data,
            run["name"],
            run["model"],
            tuple(map(len, run["layers_per_stage"])),
            groups,
            run["microbatch_size"],
            run["global_batch_size"],
            Figures(**run["measured"]),
            run.get("sailor_simulated_s"),
        )

    @property
    def cluster(self) -> str:
        """The cluster that it ran on."""
        return self.name.partition("/")[0]

    @cached_property
    def profile(self) -> ModelProfile:
        """The layers, with the times of each kind of group; sizes are those of the first group's degree."""
        kinds = {kind_of(group): self._profile_on(group).device_kinds[group.gpu] for stage in self.groups for group in stage}
        return replace(self._profile_on(self.groups[0][0]), device_kinds=kinds)

    def _profile_on(self, group: GpuNode) -> ModelProfile:
        return self.data.profile(self.model, microbatch_size=self.microbatch_size, tensor_parallel=group.num_gpus, gpu=group.gpu)

    def topology(self, rate_share: float) -> ClusterTopology:
        """The groups, a node each, where links reach a share of their measured rates."""
        groups = [group for stage in self.groups for group in stage]
        found = self.data.topology(groups, tensor_parallel=None, rate_share=rate_share, name=self.cluster)
        nodes = (
            replace(node, devices=tuple(replace(device, kind=kind_of(group)) for device in node.devices))
            for node, group in zip(found.nodes, groups, strict=True)
        )
        return replace(found, nodes=tuple(nodes))

    def plan(self, rate_share: float) -> Plan:
        """The run as a plan; a stage's groups share the rows of a microbatch, each those of one microbatch of its own."""
        topology = self.topology(rate_share)
        rows = self.microbatch_size * len(self.groups[0])
        schedule = build_schedule("1f1b", len(self.groups), self.global_batch_size // rows)
        names = iter(device.name for device in topology.devices)
        cut = Cut.of_sizes(self.layers_per_stage, tuple((edge.producer, edge.consumer) for edge in self.profile.edges()), ())
        return Plan(
            name=self.name,
            planner="measured",
            microbatch_size=rows,
            stages=tuple(tuple(self.profile.layers[layer].name for layer in layers) for layers in cut.stages),
            workers=tuple(tuple(Replica(device=next(names), share=1 / len(stage)) for _ in stage) for stage in self.groups),
            schedule=add_reductions(schedule, replicated_workers=[at for at, stage in enumerate(self.groups) if len(stage) > 1]),
            profile=self.profile,
            topology=topology,
        )

    def simulated(self, rate_share: float = 1.0) -> Figures:
        """What raypipe predicts, where links reach a share of their measured rates."""
        return _simulated(self, rate_share)


@cache
def _simulated(run: Run, rate_share: float) -> Figures:
    plan = run.plan(rate_share)
    order = CompiledOrder(plan_programs(plan))
    cost = plan_cost(plan)
    patterns = {members: ring(range(len(members))) for members in {collective.devices for collective in order.collectives}}
    timing = time_order(order, replace(cost, patterns=patterns, transfers_block=True))
    gpus = [group.num_gpus for stage in run.groups for group in stage]
    peaks = [peak / count for peak, count in zip(timing.peak_memory_bytes, gpus, strict=True)]
    return Figures(timing.makespan_s, _sum_s(timing), max(peaks))


def _sum_s(timing: Timing) -> float:
    """Seconds of the longest sum of gradients from when its last member takes part."""
    waits: dict[int, list[float]] = {}
    for of_program in timing.waits:
        for _, collective, start_s, end_s in of_program:
            if collective >= 0 and not timing.order.collectives[collective].kind.is_norm:
                waits.setdefault(collective, []).append(end_s - start_s)
    return max((min(seconds) for seconds in waits.values()), default=0.0)


def error(run: Run, rate_share: float) -> float:
    """How much longer the predicted iteration is than the measured one, relative to it."""
    return run.simulated(rate_share).iteration_s / run.measured.iteration_s - 1


def fitted_share(runs: Sequence[Run]) -> float:
    """The share that fits some runs of one cluster best; 1 without runs."""
    return min(SHARES, key=lambda share: sum(error(run, share) ** 2 for run in runs))


def cross_fitted(runs: Sequence[Run]) -> dict[str, float]:
    """For each run by name, the share that fits the other half of its cluster's runs."""
    shares: dict[str, float] = {}
    for cluster in dict.fromkeys(run.cluster for run in runs):
        own = [run for run in runs if run.cluster == cluster]
        for half, other in ((own[::2], own[1::2]), (own[1::2], own[::2])):
            shares |= dict.fromkeys((run.name for run in half), fitted_share(other))
    return shares


def judged(run: Run, rate_share: float) -> dict[str, Any]:
    """Measured and predicted figures of a run, and the relative errors of the iteration."""
    sailor = None if run.sailor_s is None else run.sailor_s / run.measured.iteration_s - 1
    return {
        "name": run.name,
        "rate_share": rate_share,
        "measured": asdict(run.measured),
        "predicted": asdict(run.simulated(rate_share)),
        "error": error(run, rate_share),
        "sailor_s": run.sailor_s,
        "sailor_error": sailor,
    }


def row(found: dict[str, Any]) -> dict[str, str]:
    measured, predicted = Figures(**found["measured"]), Figures(**found["predicted"])
    return {
        "run": found["name"],
        "share": f"{found['rate_share']:.3g}",
        "measured s": f"{measured.iteration_s:.4g}",
        "predicted s": f"{predicted.iteration_s:.4g}",
        "error": f"{found['error']:+.1%}",
        "Sailor": "-" if found["sailor_error"] is None else f"{found['sailor_error']:+.1%}",
        "sum s": f"{measured.gradient_reduction_s:.4f}",
        "predicted sum": f"{predicted.gradient_reduction_s:.4f}",
        "memory GB": f"{measured.max_memory_bytes / 1e9:.1f}",
        "predicted GB": f"{predicted.max_memory_bytes / 1e9:.1f}",
    }


def mean_error(results: Sequence[dict[str, Any]], key: str = "error") -> float:
    """The mean absolute relative error."""
    errors = [abs(found[key]) for found in results if found[key] is not None]
    return statistics.fmean(errors) if errors else math.nan


def summarise(results: Sequence[dict[str, Any]]) -> None:
    """Prints mean absolute errors of iterations, sums and memory, of all runs and by cluster."""
    for place in ("", *dict.fromkeys(found["name"].partition("/")[0] for found in results)):
        chosen = [found for found in results if found["name"].startswith(place)]
        print(
            f"{place or 'all'}: mean absolute error of the iteration {mean_error(chosen):.1%} "
            f"(Sailor's {mean_error(chosen, 'sailor_error'):.1%}), "
            f"of sums {_mean_error_of(chosen, 'gradient_reduction_s'):.0%}, of memory {_mean_error_of(chosen, 'max_memory_bytes'):.0%}"
        )


def _mean_error_of(results: Sequence[dict[str, Any]], key: str) -> float:
    pairs = [(found["predicted"][key], found["measured"][key]) for found in results if found["predicted"][key]]
    return statistics.fmean(abs(predicted / measured - 1) for predicted, measured in pairs) if pairs else math.nan


def read_runs(data: SailorData, path: Path) -> list[Run]:
    """The runs of a file like `runs.json`."""
    return [Run.of(data, run) for run in json.loads(path.read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the measurements")
    parser.add_argument("--runs", type=Path, help="judge the runs of this file, with what is fitted on those of the folder")
    parser.add_argument("--json", help="file for all values")
    options = parser.parse_args()
    data = SailorData(options.data)
    known = read_runs(data, options.data / "runs.json")
    if options.runs is None:
        shares = cross_fitted(known)
        results = [judged(run, shares[run.name]) for run in known]
    else:
        fitted = {cluster: fitted_share([run for run in known if run.cluster == cluster]) for cluster in {run.cluster for run in known}}
        results = [judged(run, fitted.get(run.cluster, 1.0)) for run in read_runs(data, options.runs)]
    print_table("Training runs, measured and predicted", [row(found) for found in results])
    summarise(results)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
