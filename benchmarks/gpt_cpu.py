"""A small GPT on the CPU: tokens a second of raypipe and of torch's 1F1B at the same cut, and raypipe's own prediction.

    python benchmarks/gpt_cpu.py [--devices 2] [--blocks 6] [--width 256] [--microbatches 8] [--rows 4]
                                 [--systems raypipe raypipe-gloo torch] [--rounds 5] [--updates 5] [--json FILE]

Layers, first weights, rows, loss and AdamW are the same, and so are, to 1e-4, the losses of the first window. One torch thread a
device. The prediction is the trainer's: every layer measured alone, the window simulated.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import torch
from rounds import Summary, in_rounds, print_table, write_json
from systems import SYSTEMS, System, Window, Work, start

from raypipe import ClusterConfig, FailureConfig, RunConfig, ScalingConfig, ScheduleConfig, Trainer
from raypipe.cluster.session import session
from raypipe.errors import RaypipeError
from raypipe.model import Batch
from raypipe.models.gpt import gpt
from raypipe.schedules.ir import UpdateScope
from raypipe.simulation.simulator import simulate

NUM_POSITIONS = 128
VOCABULARY_SIZE = 256


@dataclass(frozen=True)
class RandomTokens:
    """Rows of tokens drawn from the number of their microbatch; the same for both splits.

    Attributes:
        num_rows: of a microbatch.
        num_positions: tokens of a row.
        vocabulary_size: tokens are less than this.
    """

    num_rows: int
    num_positions: int = NUM_POSITIONS
    vocabulary_size: int = VOCABULARY_SIZE

    def __call__(self, split: str) -> RandomTokens:
        """The rows of a split."""
        assert split
        return self

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """The rows of a microbatch."""
        assert rows == (0.0, 1.0), "these stages have one device each"
        generator = torch.Generator().manual_seed(microbatch)
        tokens_BS = torch.randint(self.vocabulary_size, (self.num_rows, self.num_positions + 1), generator=generator)
        return {"tokens": tokens_BS[:, :-1].contiguous(), "targets": tokens_BS[:, 1:].contiguous()}


def work_of(arguments: argparse.Namespace) -> Work:
    """What both systems do: the blocks in equal parts, the embedding on the first stage, the head on the last."""
    sizes = [arguments.blocks // arguments.devices] * arguments.devices
    if sum(sizes) != arguments.blocks:
        sys.exit(f"--blocks {arguments.blocks} is no multiple of --devices {arguments.devices}")
    sizes[0] += 1
    sizes[-1] += 1
    return Work(
        schedule="1f1b",
        num_devices=arguments.devices,
        num_microbatches=arguments.microbatches,
        microbatch_size=arguments.rows,
        num_updates=arguments.updates,
        model=partial(
            gpt, num_layers=arguments.blocks, d_model=arguments.width, sequence_length=NUM_POSITIONS, vocabulary_size=VOCABULARY_SIZE
        ),
        batches=RandomTokens(arguments.rows),
        layers_per_stage=tuple(sizes),
    )


def predicted_s(work: Work) -> float:
    """Seconds per update of a window as the trainer predicts it, from layers that it measures here and now."""
    with tempfile.TemporaryDirectory() as folder:
        plan = (
            Trainer(
                work.model,
                batches=work.batches,
                schedule_config=ScheduleConfig(
                    name=work.schedule,
                    num_microbatches=work.num_microbatches,
                    microbatch_size=work.microbatch_size,
                    update_scope=UpdateScope.STAGE,
                    updates_per_window=work.num_updates,
                ),
                optimizer_config=work.optimizer,
                scaling_config=ScalingConfig(num_devices=work.num_devices, layers_per_stage=work.layers_per_stage),
                run_config=RunConfig(storage_path=folder, num_updates=work.num_updates, seed=work.seed),
                failure_config=FailureConfig(spare_processes=False),  # loading one takes a core for seconds
            )
            .fit()
            .plan
        )
    return simulate(plan).makespan_s / work.num_updates


def check(windows: dict[str, Window]) -> float:
    """The largest difference of a loss between systems that began with the same weights; their last gradients are as close."""
    pairs = list(itertools.combinations(windows.values(), 2))
    differences = [abs(a - b) for one, other in pairs for a, b in zip(one.losses, other.losses, strict=True)]
    differences += [abs(one.norm - other.norm) for one, other in pairs]
    assert all(difference < 1e-4 for difference in differences), f"losses or gradients differ by up to {max(differences):.2g}"
    return max(differences, default=0.0)


def measure(work: Work, names: list[str], *, num_rounds: int) -> tuple[dict[str, Summary], str]:
    """Seconds per update, predicted and of each system, and what the check of the losses found in the window before the rounds."""
    with ExitStack() as stack:
        systems: dict[str, System] = {}
        first: dict[str, Window] = {}
        for name in names:
            systems[name] = stack.enter_context(closing(start(name, work)))
            first[name] = systems[name].run_window()
            systems[name].stand_still(True)
        note = f"first loss {first[names[0]].losses[0]:.6f}, all of the first window equal to {check(first):.1g}"

        def run(name: str) -> float:
            systems[name].stand_still(False)
            window = systems[name].run_window()
            systems[name].stand_still(True)
            return window.seconds / work.num_updates

        runs = {"predicted": partial(predicted_s, work)} | {name: partial(run, name) for name in names}
        found = in_rounds(runs, num_rounds=num_rounds)
    return {name: Summary.of(values) for name, values in found.items()}, note


def row(name: str, found: dict[str, Summary], work: Work) -> dict[str, str]:
    """One line of the table."""
    tokens = work.num_microbatches * work.microbatch_size * NUM_POSITIONS
    seconds, predicted = found[name], found["predicted"]
    own = name.startswith("raypipe")
    return {
        "system": name,
        "s per update": f"{seconds.median:.4f} +-{seconds.spread:.4f}",
        "tokens per s": f"{tokens / seconds.median:.0f}",
        "predicted s": f"{predicted.median:.4f} +-{predicted.spread:.4f}" if own else "",
        "measured / predicted": f"{seconds.median / predicted.median:.3f}" if own else "",
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=5, help="of a window")
    parser.add_argument("--json", help="file for all values")
    return parser.parse_args()


def main() -> None:
    """Measures and prints the table."""
    arguments = parsed()
    work = work_of(arguments)
    try:
        with session(ClusterConfig(dashboard=False, log_to_driver=False), num_devices=3 * work.num_devices, cpus_per_device=1.0):
            found, note = measure(work, arguments.systems, num_rounds=arguments.rounds)
    except RaypipeError as error:
        sys.exit(str(error))
    title = f"GPT of {arguments.blocks} blocks, width {arguments.width}, on {work.num_devices} devices, 1F1B of {work.num_microbatches}"
    title += f" microbatches of {work.microbatch_size} x {NUM_POSITIONS} tokens; {note}"
    print_table(title, [row(name, found, work) for name in arguments.systems])
    write_json(arguments.json, {"update_s": found, "check": note, "arguments": vars(arguments)})


if __name__ == "__main__":
    main()
