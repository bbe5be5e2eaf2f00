"""What running a schedule costs beyond its work: stages that wait, on raypipe and on torch.distributed.pipelining.

    python benchmarks/overhead.py [--devices 4 8] [--microbatches 8 16 32] [--schedules gpipe 1f1b interleaved zb-v]
                                  [--systems raypipe raypipe-gloo torch] [--rounds 5] [--updates 20] [--wait-ms 5]
                                  [--calibration FILE] [--json FILE]

A forward waits once, a backward twice (input gradient, weight gradient), on the first stage too; 64 KB pass from stage to stage.
With several stages a device each of them waits as long. A window is `--updates` updates in a row, as the driver sees it: from
telling all processes to the last answer. Printed are medians over the rounds, with half the distance of the quartiles, over the
ideal: raypipe's order, simulated with the nominal waits and nothing else; and over what raypipe predicts from its measure of the
layers and the machine's calibration (`raypipe calibrate`, which runs another order, other sizes and other waits). *layers* is what
would be left if Ops and messages cost nothing: raypipe's order with the layers as measured on an idle machine, over the ideal. Most of
it are waits that end late. The ideal of
ZB-V in torch's order is that of another order: its first stage computes both gradients in W.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from rounds import Summary, in_rounds, print_table, write_json
from systems import SYSTEMS, TORCH_SCHEDULES, RaypipeSystem, System, TorchSystem, Window, Work, start
from waiting import WIDTH, NumberedRows, equal_waits, layers_per_stage

from raypipe.artifacts.calibration import Calibration
from raypipe.cluster.session import session
from raypipe.config import ClusterConfig, calibration_file
from raypipe.errors import RaypipeError
from raypipe.schedules.builders import synchronous
from raypipe.schedules.catalogue import spec
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import lower
from raypipe.schedules.text import parse_op
from raypipe.simulation.cost import StageCost
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs

NUM_ROWS = 256
"""Of WIDTH float32 numbers: 64 KB."""
SETTLE_S = 10.0
"""A Ray that was just started is busy with itself for a while."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    schedule: str
    num_devices: int
    num_microbatches: int
    num_updates: int
    wait_s: float

    @property
    def num_stages(self) -> int:
        """Over all devices."""
        return self.num_devices * spec(self.schedule).default_chunks

    @property
    def work(self) -> Work:
        """What the systems are told to do."""
        return Work(
            schedule=self.schedule,
            num_devices=self.num_devices,
            num_microbatches=self.num_microbatches,
            microbatch_size=NUM_ROWS,
            num_updates=self.num_updates,
            model=equal_waits(self.wait_s, self.num_stages),
            batches=NumberedRows(NUM_ROWS, self.num_microbatches),
            layers_per_stage=layers_per_stage(self.num_stages),
        )


@dataclass(frozen=True)
class Measured:
    """The figures of one case, in seconds per update.

    Attributes:
        ideal_s: Simulation of raypipe's order with the nominal waits.
        torch_ideal_s: Simulation of torch's order with the nominal waits.
        layers_s: Simulation of raypipe's order with its measured layers alone.
        predicted_s: Simulation with measured layers and the machine's calibration, for each transport of raypipe.
        update_s: Measured time of each system.
    """

    case: Case
    ideal_s: float
    torch_ideal_s: float
    layers_s: float
    predicted_s: dict[str, float]
    update_s: dict[str, Summary]


def simulated_s(case: Case, schedule: Schedule, *, first_stage_in_w: bool = False) -> float:
    """Seconds per update over a window, from the nominal waits alone.

    Args:
        case: which.
        schedule: its order.
        first_stage_in_w: whether the first stage computes its input gradient in W.
    """
    cost = equal_stages(schedule, forward_s=case.wait_s, backward_s=2 * case.wait_s, weight_grad_s=case.wait_s)
    if first_stage_in_w:
        first = {(0, 0): StageCost(case.wait_s, 2 * case.wait_s, 2 * case.wait_s)}
        cost = replace(cost, stages={**cost.stages, **first})
    trace = simulate_programs(lower(schedule), cost, name=case.schedule, num_updates=case.num_updates, with_memory=False)
    return trace.makespan_s / case.num_updates


def torch_simulated_s(case: Case, order: Sequence[Sequence[str]]) -> float:
    """The same for torch's own order, where it has one that raypipe's is not known to equal."""
    work = case.work
    if not order:
        return simulated_s(case, work.order)
    one_update = [[parse_op(text) for text in row] for row in order]
    schedule = synchronous(case.schedule, work.size, workers=work.order.pipelines[0], one_update=one_update)
    return simulated_s(case, schedule, first_stage_in_w=True)


def check(case: Case, name: str, window: Window) -> None:
    """Sees that no work was left out: all losses of all updates, and in the last one all gradients of all stages.

    The loss of microbatch m is m more than that of the first, whatever the weights; the gradient of every number is 1 / WIDTH.
    """
    count = case.num_microbatches
    assert len(window.losses) == case.num_updates * count, f"{name}: {len(window.losses)} losses"
    for first in range(0, len(window.losses), count):
        differences = [loss - window.losses[first] for loss in window.losses[first : first + count]]
        assert all(abs(found - number) < 1e-3 for number, found in enumerate(differences)), f"{name}: losses {differences}"
    expected = ((case.num_stages + 1) / WIDTH) ** 0.5
    assert abs(window.norm - expected) < 1e-4, f"{name}: the gradient's norm is {window.norm}, expected {expected}"


def measure(case: Case, names: Sequence[str], calibration: Calibration, *, num_rounds: int) -> Measured:
    """Runs the systems in rounds, one after the other while the others stand still, after one window each to warm up."""
    with ExitStack() as stack:
        systems: dict[str, System] = {}
        for name in names:
            systems[name] = stack.enter_context(closing(start(name, case.work)))
            systems[name].stand_still(True)

        def run(name: str) -> float:
            systems[name].stand_still(False)
            window = systems[name].run_window()
            systems[name].stand_still(True)
            check(case, name, window)
            return window.seconds / case.num_updates

        runs = {name: partial(run, name) for name in names}
        in_rounds(runs, num_rounds=1)
        seconds = in_rounds(runs, num_rounds=num_rounds)
        orders = [system.order for system in systems.values() if isinstance(system, TorchSystem)]
        ours = {name: system for name, system in systems.items() if isinstance(system, RaypipeSystem)}
        predicted_s = {name: system.predicted_s(calibration) for name, system in ours.items()}
        layers_s = statistics.fmean(system.predicted_s(None) for system in ours.values()) if ours else math.nan
    return Measured(
        case=case,
        ideal_s=simulated_s(case, case.work.order),
        torch_ideal_s=torch_simulated_s(case, orders[0] if orders else ()),
        layers_s=layers_s,
        predicted_s=predicted_s,
        update_s={name: Summary.of(values) for name, values in seconds.items()},
    )


def row(measured: Measured) -> dict[str, str]:
    """One line of the table."""
    case, ideal_s = measured.case, measured.ideal_s
    medians = {name: summary.median for name, summary in measured.update_s.items()}
    found = {"schedule": case.schedule, "devices": f"{case.num_devices}", "microbatches": f"{case.num_microbatches}"}
    found |= {"ideal ms": f"{1e3 * ideal_s:.1f}", "torch's ms": f"{1e3 * measured.torch_ideal_s:.1f}"}
    found["layers"] = f"{measured.layers_s / ideal_s:.3f}"
    for name, summary in measured.update_s.items():
        found[name] = f"{summary.median / ideal_s:.3f} +-{summary.spread / ideal_s:.3f}"
    found |= {f"{name} / predicted": f"{medians[name] / seconds:.3f}" for name, seconds in measured.predicted_s.items()}
    if "raypipe" in medians:
        found |= {f"raypipe / {name}": f"{medians['raypipe'] / median:.3f}" for name, median in medians.items() if name != "raypipe"}
    return found


def means(results: Sequence[Measured]) -> dict[str, float]:
    """Geometric means over all cases: of each system over the ideal, and of raypipe over the others."""
    names = list(results[0].update_s)
    medians = {name: [result.update_s[name].median for result in results] for name in names}
    ideals = [result.ideal_s for result in results]
    against = {"layers / ideal": ([result.layers_s for result in results], ideals)}
    against |= {f"{name} / ideal": (medians[name], ideals) for name in names}
    if "torch" in names:
        against["torch / its order's ideal"] = (medians["torch"], [result.torch_ideal_s for result in results])
    for name in results[0].predicted_s:
        against[f"{name} / predicted"] = (medians[name], [result.predicted_s[name] for result in results])
    if "raypipe" in names:
        against |= {f"raypipe / {name}": (medians["raypipe"], medians[name]) for name in names if name != "raypipe"}
    return {title: statistics.geometric_mean(a / b for a, b in zip(*pair, strict=True)) for title, pair in against.items()}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--schedules", nargs="+", choices=list(TORCH_SCHEDULES), default=list(TORCH_SCHEDULES))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--wait-ms", type=float, default=5.0)
    parser.add_argument("--calibration", default=str(calibration_file()), help="as written by `raypipe calibrate`")
    parser.add_argument("--json", help="file for all values")
    return parser.parse_args()


def main() -> None:
    """Measures all cases and prints the table."""
    arguments = parsed()
    cases = [
        Case(schedule, devices, microbatches, arguments.updates, arguments.wait_ms / 1e3)
        for devices in arguments.devices
        for schedule in arguments.schedules
        for microbatches in arguments.microbatches
    ]
    results: list[Measured] = []
    num_places = max(arguments.devices) * len([name for name in arguments.systems if name != "torch"])
    try:
        calibration = Calibration.load(arguments.calibration)
        with session(ClusterConfig(dashboard=False, log_to_driver=False), num_devices=num_places, cpus_per_device=1.0):
            time.sleep(SETTLE_S)
            for case in cases:
                results.append(measure(case, arguments.systems, calibration, num_rounds=arguments.rounds))
                print(", ".join(f"{name} {value}" for name, value in row(results[-1]).items()), file=sys.stderr)
    except RaypipeError as error:
        sys.exit(str(error))
    title = f"Seconds per update over the ideal; F = I = W = {arguments.wait_ms:g} ms, {arguments.updates} updates a window"
    print_table(f"{title}, medians of {arguments.rounds} rounds", [row(result) for result in results])
    print_table("Geometric means over all cases", [{name: f"{value:.4f}" for name, value in means(results).items()}])
    write_json(arguments.json, {"cases": results, "means": means(results)})


if __name__ == "__main__":
    main()
