"""What an update waits for, and what that costs: ZB-H2 over six updates gains on ZB-H1 with scope `stage`, not with `global`.

    python benchmarks/update_scope.py [--rounds 5] [--wait-ms 8] [--json FILE]

Stages wait instead of computing (F = I = W), so that two cores are enough for four stages; everything else is real: Ray actors,
gloo, the executor. All cases run in every round, in turn; printed are medians over the rounds of the time per update,
with half the distance of the quartiles, beside the simulator's prediction from the nominal waits.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial

from rounds import Summary, in_rounds, print_table, write_json
from waiting import NumberedRows, equal_waits, layers_per_stage

from raypipe import ClusterConfig, RunConfig, ScalingConfig, ScheduleConfig, Trainer
from raypipe.cluster.session import session
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.lower import lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs

NUM_DEVICES = 4
NUM_MICROBATCHES = 12
NUM_UPDATES = 6
NUM_ROWS = 8
CASES = (
    ("1f1b", UpdateScope.GLOBAL),
    ("zb-h1", UpdateScope.GLOBAL),
    ("zb-h2", UpdateScope.GLOBAL),
    ("zb-h2", UpdateScope.STAGE),
)


def measured_update_s(name: str, scope: UpdateScope, wait_s: float, folder: str) -> float:
    """Seconds per update over the window, as the actors' clocks have it: from the first Op to the last."""
    result = Trainer(
        equal_waits(wait_s, NUM_DEVICES),
        batches=NumberedRows(NUM_ROWS, NUM_MICROBATCHES),
        schedule_config=ScheduleConfig(
            name=name,
            num_microbatches=NUM_MICROBATCHES,
            microbatch_size=NUM_ROWS,
            update_scope=scope,
            updates_per_window=NUM_UPDATES,
        ),
        scaling_config=ScalingConfig(num_devices=NUM_DEVICES, layers_per_stage=layers_per_stage(NUM_DEVICES)),
        run_config=RunConfig(name=f"{name}-{scope}", storage_path=folder, num_updates=2 * NUM_UPDATES),
    ).fit()
    figures = {figure.name: figure.measured for figure in result.figures}
    return figures["update time"]


def predicted_update_s(name: str, scope: UpdateScope, wait_s: float) -> float:
    """The same by simulation with the nominal waits."""
    schedule = build(name, ScheduleRequest(NUM_DEVICES, NUM_MICROBATCHES, NUM_UPDATES, update_scope=scope))
    cost = equal_stages(schedule, forward_s=wait_s, backward_s=2 * wait_s, weight_grad_s=wait_s)
    return simulate_programs(lower(schedule), cost, name=name, num_updates=NUM_UPDATES).update_s


def row(name: str, scope: UpdateScope, wait_s: float, measured: Summary, base: Summary) -> dict[str, str]:
    """One line of the table."""
    predicted = predicted_update_s(name, scope, wait_s)
    return {
        "schedule": name,
        "scope": scope,
        "predicted s": f"{predicted:.4f}",
        "measured s": f"{measured.median:.4f}",
        "spread": f"{measured.spread:.4f}",
        "measured / predicted": f"{measured.median / predicted:.3f}",
        "against 1f1b": f"{base.median / measured.median:.3f}x",
    }


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait-ms", type=float, default=8.0)
    parser.add_argument("--json", help="file for all values")
    arguments = parser.parse_args()
    wait_s = arguments.wait_ms / 1e3
    with (
        session(ClusterConfig(dashboard=False, log_to_driver=False), num_devices=NUM_DEVICES, cpus_per_device=1.0),
        tempfile.TemporaryDirectory() as folder,
    ):
        runs = {case: partial(measured_update_s, *case, wait_s, folder) for case in CASES}
        found = {case: Summary.of(values) for case, values in in_rounds(runs, num_rounds=arguments.rounds).items()}
    rows = [row(*case, wait_s, measured, found[CASES[0]]) for case, measured in found.items()]
    print_table(
        f"{NUM_DEVICES} stages, {NUM_MICROBATCHES} microbatches, {NUM_UPDATES} updates a window, F = I = W = {arguments.wait_ms} ms", rows
    )
    write_json(arguments.json, [{**line, "values": measured.values} for line, measured in zip(rows, found.values(), strict=True)])


if __name__ == "__main__":
    main()
