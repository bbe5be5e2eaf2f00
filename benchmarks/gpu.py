"""Figures of stages on a GPU: what raypipe costs beyond plain PyTorch, what the host costs, and whether traces and predictions hold.

    python benchmarks/gpu.py [--parts stage host profile fault share] [--layers 24] [--width 1024] [--heads 16] [--positions 1024]
                             [--vocabulary 50304] [--microbatches 4] [--rows 8] [--updates 5] [--rounds 5] [--precision bf16-mixed]
                             [--sharing 2 4] [--kills 3] [--traces FOLDER] [--json FILE]

stage   One stage: tokens a second of one raypipe actor and of a training loop as one writes it by hand (gradients accumulated over the
        microbatches, fused AdamW, no clipping), on the same GPU in interleaved rounds; a GPT of 355 million parameters by default, and a
        head of its own with 52 million. MFU is 6 FLOPs a token and parameter of all but the embedding, which multiplies nothing, and 12
        a layer, position and width for attention, over what the GPU can do in bfloat16.
        Also: the window by the trace, which is of CUDA events, over the driver's wall time; measured over predicted; memory.
host    What an Op costs the host until its kernels are enqueued, with layers so small that the GPU never holds it up: of the executor,
        and of the same layers called by hand.
profile The kernels of an update, one stage in this process: seconds in all, and in which the GPU stands idle, of raypipe and of the loop;
        the kernels in which they differ most.
fault   How long the others go on after one of two actors is killed in a window.
share   Two and four actors on one GPU, each with its part of the layers, over one with all of them, and over the sum of the plain loop's
        kernels: what messages and sharing cost. Beside it torch's own pipelines in as many processes, if they run there.

Not timed as a whole yet. By parts, one H100 is expected to take about 1 minute for `stage`, half a minute each for `host` and `profile`,
half a minute or more a kill for `fault`, and up to 8 minutes for `share`: where time is limited, run each part by itself, `share` last and
with `--sharing 2 --updates 3 --rounds 3`.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpt_cpu import RandomTokens
from rounds import Summary, in_rounds, print_table, write_json
from systems import RaypipeSystem, System, TorchSystem, Work
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from raypipe import ClusterConfig
from raypipe.actors.devices import upload
from raypipe.actors.execution.batches import FixedBatch
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.cluster.session import session
from raypipe.config import Precision, Transport
from raypipe.errors import RaypipeError
from raypipe.model import Model
from raypipe.models.gpt import gpt
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest

DENSE_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Of products of matrices, by a word of the GPU's name, as NVIDIA's data sheets have them without sparsity."""


def by_hand(model: Model, *, seed: int) -> nn.Sequential:
    """The layers of a chain, with the weights that raypipe gives them."""
    return nn.Sequential(*(build_layer(layer, index=index, seed=seed) for index, layer in enumerate(model.layers)))


class PlainLoop:
    """Training as one writes it by hand for one GPU.

    Args:
        work: what to do, on one device.
        precision: float32, or bfloat16 by autocast.
    """

    def __init__(self, work: Work, precision: Precision, device: torch.device) -> None:
        model = work.model()
        self.work = work
        self.device = device
        self.precision = precision
        self.loss = model.loss
        self.layers = by_hand(model, seed=work.seed).to(device)
        self.optimizer = build_optimizer(work.optimizer, self.layers.named_parameters())
        self.batches = work.batches("train")
        self.done = 0

    def run_window(self) -> tuple[float, list[float]]:
        """The seconds of the next window, and its losses."""
        torch.cuda.synchronize()
        since = time.perf_counter()
        losses: list[torch.Tensor] = []
        for _ in range(self.work.num_updates):
            for _ in range(self.work.num_microbatches):
                batch = upload(self.batches.batch(self.done, (0.0, 1.0)), self.device)
                low = torch.autocast("cuda", torch.bfloat16) if self.precision is Precision.BF16_MIXED else nullcontext()
                with low:
                    output = self.layers(batch["tokens"])
                loss = self.loss(output.float(), batch)
                (loss / self.work.num_microbatches).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
                self.done += 1
            self.optimizer.step()
            self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - since, [float(loss) for loss in losses]


def work_of(arguments: argparse.Namespace, *, num_devices: int, schedule: str = "1f1b") -> Work:
    """One window, the blocks in equal parts, the embedding on the first stage, the head on the last."""
    sizes = [arguments.layers // num_devices] * num_devices
    sizes[0] += 1
    sizes[-1] += 1
    return Work(
        schedule=schedule,
        num_devices=num_devices,
        num_microbatches=arguments.microbatches,
        microbatch_size=arguments.rows,
        num_updates=arguments.updates,
        model=partial(
            gpt,
            num_layers=arguments.layers,
            d_model=arguments.width,
            num_heads=arguments.heads,
            sequence_length=arguments.positions,
            vocabulary_size=arguments.vocabulary,
        ),
        batches=RandomTokens(arguments.rows, num_positions=arguments.positions, vocabulary_size=arguments.vocabulary),
        layers_per_stage=tuple(sizes),
        gpus_per_device=1.0 / num_devices if torch.cuda.device_count() < num_devices else 1.0,
        precision=Precision(arguments.precision),
    )


@dataclass(frozen=True)
class Part:
    """What a part of the benchmark found: the lines of its table and all values."""

    title: str
    rows: list[dict[str, str]]
    values: dict[str, Any]


def one_stage(arguments: argparse.Namespace) -> Part:
    """One actor against the plain loop."""
    work = work_of(arguments, num_devices=1)
    device = torch.device("cuda", 0)
    plain = PlainLoop(work, work.precision, device)
    num_parameters = sum(weight.numel() for weight in plain.layers.parameters())
    tokens = work.num_microbatches * work.microbatch_size * arguments.positions
    num_multiplied = num_parameters - sum(weight.numel() for weight in plain.layers[0].parameters())
    flops = tokens * (6 * num_multiplied + 12 * arguments.layers * arguments.width * arguments.positions)
    name = torch.cuda.get_device_name(device)
    peak = next((flops for word, flops in DENSE_BF16_FLOPS.items() if word in name), math.nan)
    with closing(RaypipeSystem(work, transport=Transport.AUTO)) as raypipe:
        predicted_s = raypipe.predicted_s(None)
        traces: list[float] = []

        def ours() -> float:
            window = raypipe.run_window()
            traces.append(raypipe.last.trace.makespan_s / window.seconds)
            return window.seconds / work.num_updates

        def theirs() -> float:
            return plain.run_window()[0] / work.num_updates

        first, other = raypipe.run_window().losses, plain.run_window()[1]
        difference = max(abs(a - b) / abs(b) for a, b in zip(first, other, strict=True))
        in_turn = in_rounds({"raypipe": ours, "plain": theirs}, num_rounds=arguments.rounds)
        peak_bytes = raypipe.last.reports[0].peak_memory_bytes
    found = {key: Summary.of(value) for key, value in in_turn.items()}
    ratio = found["plain"].median / found["raypipe"].median
    rows = [
        {
            "system": key,
            "s per update": f"{summary.median:.4f} +-{summary.spread:.4f}",
            "tokens per s": f"{tokens / summary.median:.0f}",
            "MFU": f"{flops / summary.median / peak:.3f}",
            "over plain": f"{found['plain'].median / summary.median:.3f}",
            "measured / predicted": f"{summary.median / predicted_s:.3f}" if key == "raypipe" else "",
            "trace / wall": f"{Summary.of(traces).median:.3f}" if key == "raypipe" else "",
            "peak memory": f"{(peak_bytes or 0) / 1e9:.2f} GB" if key == "raypipe" else "",
        }
        for key, summary in found.items()
    ]
    values = {"parameters": num_parameters, "gpu": name, "seconds": found, "over_plain": ratio, "predicted_s": predicted_s}
    values |= {"trace_over_wall": traces, "peak_memory_bytes": peak_bytes, "largest_relative_difference_of_losses": difference}
    title = f"One stage, {num_parameters / 1e6:.0f} million parameters, {arguments.precision}, {name}; losses differ by {difference:.1g}"
    return Part(title, rows, values)


def host(arguments: argparse.Namespace) -> Part:
    """The host's seconds an Op."""
    device = torch.device("cuda", 0)
    model = mlp(num_layers=2, width=16)
    num_microbatches, num_updates = 64, 2
    batches = FixedBatch({name: torch.ones(2, 16) for name in ("inputs", "targets")})
    pipeline = LocalPipeline(
        model,
        cut=Cut.equal(2, 1, model.edges()),
        schedule=build("1f1b", ScheduleRequest(1, num_microbatches, num_updates)),
        batches=batches,
        optimizer=lambda weights: torch.optim.AdamW(weights, fused=True),
        learning_rate=lambda _: 1e-3,
        on=device,
    )
    layers = by_hand(model, seed=0).to(device)
    num_ops = 2 * num_microbatches * num_updates

    def executor() -> float:
        since = time.perf_counter()
        pipeline.run_window()
        return (time.perf_counter() - since) / num_ops

    def plain() -> float:
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(num_ops // 2):
            batch = upload(batches.batch(0, (0.0, 1.0)), device)
            model.loss(layers(batch["inputs"]), batch).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return (time.perf_counter() - since) / num_ops

    for warm_up in (executor, plain) * 2:
        warm_up()
    in_turn = in_rounds({"executor": executor, "plain": plain}, num_rounds=4 * arguments.rounds)
    found = {key: Summary.of(values) for key, values in in_turn.items()}
    rows = [{"what": key, "us an Op": f"{1e6 * summary.median:.1f} +-{1e6 * summary.spread:.1f}"} for key, summary in found.items()]
    rows.append({"what": "the executor's own", "us an Op": f"{1e6 * (found['executor'].median - found['plain'].median):.1f}"})
    return Part("What an Op costs the host, with layers of no size (half forwards, half backwards)", rows, {"seconds": found})


def profile(arguments: argparse.Namespace) -> Part:
    """The kernels of one update."""
    work = replace(work_of(arguments, num_devices=1), num_updates=1)
    device = torch.device("cuda", 0)
    model = work.model()
    ours = LocalPipeline(
        model,
        cut=work.cut,
        schedule=work.order,
        batches=work.batches("train"),
        optimizer=lambda weights: build_optimizer(work.optimizer, weights),
        learning_rate=lambda _: work.learning_rate,
        precision=work.precision,
        on=device,
    )
    theirs = PlainLoop(work, work.precision, device)
    found: dict[str, Kernels] = {}
    runs: dict[str, Callable[[], object]] = {"raypipe": ours.run_window, "plain": theirs.run_window}
    for name, run in runs.items():
        for _ in range(3):
            run()
        found[name] = Kernels.of(run, trace=f"{arguments.traces}/{name}.json.gz" if arguments.traces else None)
    ours.close()
    rows = [
        {
            "system": name,
            "kernels": str(sum(kernels.counts.values())),
            "ms in all": f"{1e3 * kernels.busy_s:.2f}",
            "ms from first to last": f"{1e3 * kernels.span_s:.2f}",
            "idle": f"{1 - kernels.union_s / kernels.span_s:.3f}",
        }
        for name, kernels in found.items()
    ]
    ours_s, theirs_s = (found[name].seconds for name in ("raypipe", "plain"))
    more = {name: ours_s.get(name, 0.0) - theirs_s.get(name, 0.0) for name in ours_s | theirs_s}
    for name, seconds in sorted(more.items(), key=lambda item: -abs(item[1]))[:12]:
        counts = "/".join(str(kernels.counts.get(name, 0)) for kernels in found.values())
        rows.append({
            "system": name[:70],
            "kernels": counts,
            "ms in all": f"{1e3 * seconds:+.3f}",
            "ms from first to last": "",
            "idle": "",
        })
    return Part("Kernels of one update in one process; below, raypipe less plain", rows, {"kernels": found})


@dataclass(frozen=True)
class Kernels:
    """What the GPU did: kernels and copies by name."""

    counts: dict[str, int]
    seconds: dict[str, float]
    busy_s: float
    union_s: float
    span_s: float

    @classmethod
    def of(cls, run: Callable[[], object], *, trace: str | None = None) -> Kernels:
        """Profiles a run."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize()
        if trace:
            profiled.export_chrome_trace(trace)
        on_gpu = [event for event in profiled.events() or [] if event.device_type == DeviceType.CUDA]
        counts, seconds = Counter[str](), defaultdict[str, float](float)
        union_us = until = 0.0
        for event in sorted(on_gpu, key=lambda event: event.time_range.start):
            start, end = event.time_range.start, event.time_range.end
            counts[event.name] += 1
            seconds[event.name] += (end - start) / 1e6
            union_us += max(end - max(start, until), 0.0)
            until = max(until, end)
        span_us = until - min(event.time_range.start for event in on_gpu)
        return cls(dict(counts), dict(seconds), sum(seconds.values()), union_us / 1e6, span_us / 1e6)


def shared(arguments: argparse.Namespace) -> Part:
    """One actor with all layers; two and four with their parts, by schedule and transport; torch's processes."""
    alone = replace(work_of(arguments, num_devices=1), num_updates=1)
    plain = PlainLoop(alone, alone.precision, torch.device("cuda", 0))
    for _ in range(3):
        plain.run_window()
    kernels_s = Kernels.of(plain.run_window).busy_s
    del plain
    torch.cuda.empty_cache()
    found: dict[str, Summary] = {}
    failed: dict[str, str] = {}
    cases = [(1, "1f1b", "raypipe")]
    for number in arguments.sharing:
        cases += [(number, schedule, "raypipe") for schedule in ("1f1b", "zb-h1", "amdp")]
        cases += [(number, "1f1b", "raypipe-nccl"), (number, "1f1b", "torch")]
    for number, schedule, name in cases:
        key = _key(number, schedule, name)
        since = time.perf_counter()
        try:
            work = work_of(arguments, num_devices=number, schedule=schedule)
            system: System = TorchSystem(work) if name == "torch" else RaypipeSystem(work, transport=_TRANSPORTS[name])
            with closing(system):
                system.run_window()
                seconds = [system.run_window().seconds / work.num_updates for _ in range(arguments.rounds)]
        except Exception as error:  # the others are measured all the same
            failed[key] = f"{type(error).__name__}: {error}"[-600:]
            print(f"{key} failed after {time.perf_counter() - since:.0f} s: {failed[key]}", flush=True)
            continue
        found[key] = Summary.of(seconds)
        print(f"{key}: {found[key].median:.4f} s an update; {time.perf_counter() - since:.0f} s in all", flush=True)
    alone_s = found[_key(*cases[0])].median if _key(*cases[0]) in found else math.nan
    rows = [
        {
            "on one GPU": key,
            "s per update": f"{summary.median:.4f} +-{summary.spread:.4f}",
            "over one actor": f"{summary.median / alone_s:.3f}",
            "over all kernels": f"{summary.median / kernels_s:.3f}",
        }
        for key, summary in found.items()
    ]
    return Part("Actors on one GPU, one after the other measured", rows, {"kernels_s": kernels_s, "seconds": found, "failed": failed})


def _key(number: int, schedule: str, name: str) -> str:
    return f"{number} x {schedule}, {name}"


def fault(arguments: argparse.Namespace) -> Part:
    """The seconds from the death of one of two actors to the driver's error, and to when the other one is at rest."""
    work = work_of(arguments, num_devices=2)
    told: list[float] = []
    rested: list[float] = []
    problem = ""
    for _ in range(arguments.kills):
        system = RaypipeSystem(work, transport=Transport.AUTO)
        with closing(system.coordinator):
            system.run_window()
            window_s = system.run_window().seconds
            died: list[float] = []

            def kill(system: RaypipeSystem = system, died: list[float] = died) -> None:
                died.append(time.perf_counter())
                os.kill(system.coordinator.actors.infos[1].pid, signal.SIGKILL)

            timer = threading.Timer(window_s / 2, kill)
            timer.start()
            try:
                system.run_window()
            except RaypipeError as error:
                told.append(time.perf_counter() - died[0])
                problem = str(error)
            timer.join()
            system.coordinator.actors.rest([1])
            rested.append(time.perf_counter() - died[0])
    rows = [
        {"after the death": "the driver knows", "s": " ".join(f"{value:.2f}" for value in told)},
        {"after the death": "the other actor is at rest", "s": " ".join(f"{value:.2f}" for value in rested)},
    ]
    return Part("One of two actors is killed in a window", rows, {"told_s": told, "rested_s": rested, "error": problem})


_TRANSPORTS = {"raypipe": Transport.AUTO, "raypipe-nccl": Transport.NCCL}
PARTS = {"stage": one_stage, "host": host, "profile": profile, "fault": fault, "share": shared}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    for name, default in {"layers": 24, "width": 1024, "heads": 16, "positions": 1024, "vocabulary": 50304}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"microbatches": 4, "rows": 8, "updates": 5, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=[Precision.FLOAT32, Precision.BF16_MIXED], default=Precision.BF16_MIXED)
    parser.add_argument("--sharing", type=int, nargs="+", default=[2, 4], metavar="N", help="actors on one GPU")
    parser.add_argument("--kills", type=int, default=3, help="of `fault`")
    parser.add_argument("--traces", help="folder for the traces of `profile`")
    parser.add_argument("--json", help="file for all values")
    return parser.parse_args()


def main() -> None:
    """Measures and prints; a part that fails is named, and the others are measured all the same."""
    arguments = parsed()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; this benchmark is for machines with one")
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
    failed: list[str] = []
    with session(ClusterConfig(dashboard=False), num_devices=max(arguments.sharing), cpus_per_device=1.0):
        for name in arguments.parts:
            since = time.perf_counter()
            try:
                part = PARTS[name](arguments)
            except Exception:
                failed.append(name)
                results[f"{name} failed"] = traceback.format_exc()
                traceback.print_exc()
            else:
                results[part.title] = part.values
                print_table(part.title, part.rows)
            print(f"{name}: {time.perf_counter() - since:.0f} s", flush=True)
            write_json(arguments.json, results)
            gc.collect()  # executors and their clocks know each other
            torch.cuda.empty_cache()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
