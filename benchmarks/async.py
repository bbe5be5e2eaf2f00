"""Asynchronous against synchronous schedules on the shapes of the AMDP paper, simulated and rehearsed.

    python benchmarks/async.py [--models gpt bert] [--devices 4 8 16] [--scope stage] [--scope global] [--json FILE]
    python benchmarks/async.py --rehearse [--models gpt] [--devices 8] [--scope stage] [--time-scale 4] [--byte-scale 0.002] [--rounds 3]

A GPT of 1.56 and a BERT of 1.04 thousand million parameters (48 and 32 blocks, H = 1600), microbatches of 4 sequences, as in Chen,
Wu and Yu (ICML 2026, arXiv 2605.29664), whose figures are 8 A800 on NVLink; 16 devices are two such nodes with 100 Gbit/s a device.
Times of layers are counted, not measured (`models.py`), and an Adam step moves 28 bytes a parameter. Every schedule runs the same work
with two cuts: equal numbers of blocks, with the embedding in the first stage and the head in the last, as in the paper; and its own
best one, chosen by simulation: first among cuts that balance the stages or the sums over each device's stages, then by moving single
layers. Reductions of gradients, publications of weights (ZeRO-1 where a stage has copies) and the messages' bytes are in the times.

`stage`: untied weights, each stage clips by its own norm; `global`: one norm over all stages, for which every update waits. Under it the
asynchronous schedules of one pipeline update where all gradients have arrived (`defer_updates`), not where their own stage's have.
Printed for each case: sequences a second far from the ends of a window, how far amdp is ahead, bubble, most memory of a device, mismatch,
delay.

`--rehearse` runs the same programs with waits for computation, an actor a device on this machine, at the smallest batch, with each
schedule's own cut, all in every round. The scales are printed: with few cores, messages and sums must be small, for it is these that
take computation. Links and overheads of the prediction are those of this machine (`raypipe calibrate`).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from async_cases import BATCHES, OWN, SHAPES, Case, compared, cuts_of, plan_of, problem_of
from rounds import Summary, in_rounds, print_table, write_json

from raypipe.artifacts.calibration import Calibration
from raypipe.cluster.session import session
from raypipe.config import ClusterConfig, calibration_file
from raypipe.errors import RaypipeError
from raypipe.schedules.ir import UpdateScope
from raypipe.training.rehearsal import Rehearsal, rehearse

_WINDOWS = 2
"""Of each rehearsal, besides the first."""


def rehearsals(model: str, num_devices: int, scope: UpdateScope, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each schedule's update as simulated and as rehearsed."""
    costs = Calibration.load(calibration_file()).of("shm")
    problem = problem_of(model, num_devices, BATCHES[num_devices][0])
    plans = {case: plan_of(case, problem, scope, cuts, costs) for case, cuts in cuts_of(model, num_devices, scope, own=True).items()}

    def rehearsed(case: Case) -> Rehearsal:
        return rehearse(
            plans[case],
            num_windows=_WINDOWS,
            num_updates=plans[case].schedule.num_updates,
            time_scale=options.time_scale,
            byte_scale=options.byte_scale,
        )

    with session(ClusterConfig(dashboard=False, log_to_driver=False), num_devices=num_devices, cpus_per_device=1.0):
        found = in_rounds({case: lambda case=case: rehearsed(case) for case in plans}, num_rounds=options.rounds)  # type: ignore[misc]
    results: list[dict[str, Any]] = []
    rows: list[dict[str, str]] = []
    for case, several in found.items():
        measured = Summary.of([window.steady_update_s for one in several for window in one.windows])
        simulated_s = several[0].predicted.steady_update_s
        results.append({
            "model": model,
            "devices": num_devices,
            "scope": str(scope),
            "schedule": str(case),
            "simulated_s": simulated_s,
            "rehearsed": measured,
        })
        rows.append({
            "schedule": str(case),
            "simulated s": f"{simulated_s:.4f}",
            "rehearsed s": f"{measured.median:.4f}",
            "spread": f"{measured.spread:.4f}",
            "rehearsed / simulated": f"{measured.median / simulated_s:.3f}",
        })
    scales = f"computation x {options.time_scale:g}, bytes x {options.byte_scale:g}"
    print_table(f"{model}, {num_devices} devices, batch {BATCHES[num_devices][0]}, scope {scope}, own cuts; {scales}", rows)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--devices", nargs="+", type=int, choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--scope", action="append", choices=[str(UpdateScope.STAGE), str(UpdateScope.GLOBAL)])
    parser.add_argument("--rehearse", action="store_true", help="run with waits for computation")
    parser.add_argument("--time-scale", type=float, default=4.0)
    parser.add_argument("--byte-scale", type=float, default=0.002)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for all values")
    options = parser.parse_args()
    if options.rehearse:
        scopes = [UpdateScope(scope) for scope in options.scope or ["stage"]]
        cases = [(model, num_devices, scope) for model in options.models for num_devices in options.devices for scope in scopes]
        try:
            write_json(options.json, [result for case in cases for result in rehearsals(*case, options)])
        except RaypipeError as error:
            sys.exit(str(error))
        return
    results: list[dict[str, Any]] = []
    summary: list[dict[str, str]] = []
    for model in options.models:
        for num_devices in options.devices:
            for scope in map(UpdateScope, options.scope or ["stage", "global"]):
                for own_cut in (False, True):
                    cuts = cuts_of(model, num_devices, scope, own=own_cut)
                    rows: list[dict[str, str]] = []
                    for batch in BATCHES[num_devices]:
                        found = [each | {"own_cut": own_cut} for each in compared(model, num_devices, batch, scope, cuts)]
                        results += found
                        own = next(each for each in found if each["schedule"] == OWN)["sequences_per_s"]
                        best, best_auto = (
                            max((each for each in found if kind(each["schedule"])), key=lambda each: float(each["sequences_per_s"]))
                            for kind in (lambda name: not name.startswith("amdp"), lambda name: name.startswith("amdp-auto"))
                        )
                        cut = "own cut" if own_cut else "equal cut"
                        summary.append({
                            "model": model,
                            "D": str(num_devices),
                            "b": str(batch),
                            "scope": str(scope),
                            "cut": cut,
                            "amdp seq/s": f"{own:.1f}",
                            "best other": best["schedule"],
                            "amdp / best": f"{own / best['sequences_per_s']:.3f}",
                            "amdp-auto / best": f"{best_auto['sequences_per_s'] / best['sequences_per_s']:.3f}",
                        })
                        rows += [
                            {
                                "b": str(batch),
                                "schedule": each["schedule"],
                                "seq/s": f"{each['sequences_per_s']:.1f}",
                                "amdp / it": f"{own / each['sequences_per_s']:.3f}",
                                "bubble": f"{100 * each['bubble']:.1f}%",
                                "GB": f"{each['peak_memory_bytes'] / 1e9:.1f}",
                                "mismatch": str(each["max_mismatch"]),
                                "delay": str(each["max_delay"]),
                                "on average": f"{each['mean_delay']:.2f}",
                            }
                            for each in found
                        ]
                    print_table(f"{model}, {num_devices} devices, scope {scope}, {cut}, simulated", rows)
    print_table("amdp over the best other, simulated", summary)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
