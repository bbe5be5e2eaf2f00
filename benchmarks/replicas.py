"""Training two stages of two copies on nodes with one port each: raypipe's 2BW against the usual one, 1F1B, and torch's 1F1B with DDP.

    raypipe data prepare python-stdlib -o data/python-stdlib.parquet
    python benchmarks/replicas.py [--models gpt ngram] [--systems a torch raypipe] [--data FILE] [--rounds 3] [--stretch 4] [--json FILE]

As root, with iproute2.

`gpt` is a GPT of 5.3 million parameters (6 blocks of width 256, 1024 tokens), `ngram` the GPT with n-gram tables of
`raypipe.models.ngram_gpt`. An update has four microbatches of 4 x 128 bytes of Python's standard library. All that leaves a
node, and all that enters it, shares one rate. The nodes are network namespaces of this machine and share its cores. With `--stretch K`
each forward and each backward of a layer takes K times its own CPU seconds in all systems, most of which it sleeps (`stretched.py`): so
four actors do not fill two cores, and each has what a core of its own would give it. C is the time of an update of raypipe's order where
ports have no limit; A is that of the sum of the first stage's gradients on its port. For `gpt` A is 0.55 C; `ngram` has twice that rate.

    a        pipedream-2bw, its sum started and awaited behind the last backward, as one vector, over gloo
    a'       the same with each U where its version is first read
    b        1F1B with a flush and the sum behind it, as one vector, over gloo
    c        as a, in buckets that leave as they are complete, the first of them inside the last backward
    torch    torch.distributed.pipelining's 1F1B, each stage in DistributedDataParallel, over gloo; the fastest of several bucket sizes
    dense    2BW with scheduled communication: U where its version is first read, forwards ahead, over raypipe's own connections
    raypipe  the same; rows of gradients instead of whole ones where a model looks up a table

Printed are milliseconds of an update, far from the ends of the median window. "Possible" is the larger of C and what a port carries in an
update, without rows that no update touches. Of 2BW all losses are equal, bit for bit; those of `b` and `torch` up to rounding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cluster in namespaces is made by the tests' own tools

from communication import Cell
from replicas_models import LENGTH, TASKS, Task
from rounds import Summary, in_rounds, print_table, write_json

from raypipe import build_schedule
from raypipe.actors.execution.batches import FileSource
from raypipe.actors.measure.layers import measure_layers
from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.analysis.idle import divide
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.config import OptimizerConfig
from raypipe.model import Model
from raypipe.planning.ahead import with_forwards_ahead
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.profiling.profiler import model_profile
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.passes import forwards_ahead, late_updates
from raypipe.schedules.reductions import add_reductions
from tests.multinode.cluster import Cluster, cluster
from tests.multinode.network import finish
from tests.on_ray.plans import plan_of

NUM_STAGES = 2
NUM_COPIES = 2
NUM_DEVICES = NUM_STAGES * NUM_COPIES
NUM_MICROBATCHES = 4
MICROBATCH_SIZE = 4
UPDATES_PER_WINDOW = 6
NUM_UPDATES = 3 * UPDATES_PER_WINDOW
SUM_SHARE = 0.55
BUCKETS_MB = (1, 4, 25)
"""The last is the default of DistributedDataParallel."""
SYSTEMS = ("a", "a'", "b", "c", "torch", "dense", "raypipe")
SEED = 0
OPTIMIZER = OptimizerConfig(max_grad_norm=None)
TORCH_PORT = 29500
TIMEOUT_S = 280.0
CONFIG = """
format: raypipe.train/1
model: {{function: "{function}", options: {{dense: {dense}, stretch: {stretch}}}}}
data: {{path: "{data}", sequence_length: {length}, num_validation_microbatches: 0}}
schedule: {{updates_per_window: {window}}}
scaling: {{transport: {transport}}}
optimizer: {{max_grad_norm: null}}
plan: "{plan}"
run: {{name: "{name}", storage_path: "{folder}", num_updates: {updates}, checkpoint_every: 0, seed: {seed}}}
"""


@dataclass(frozen=True)
class Run:
    """What a system did.

    Attributes:
        update_s: Seconds of an update far from the ends of the median window.
        losses: Of each update.
        exposed_s: Seconds in an update of that window that a device waits for transfers, by what they carry, in the mean over devices;
            empty for torch, which does not tell.
    """

    update_s: float
    losses: list[float]
    exposed_s: Mapping[str, float] = field(default_factory=dict)


# torch, in a process of each node


def serve_torch(options: argparse.Namespace) -> None:
    """Train one stage of one copy with torch's schedule; print seconds of updates and losses."""
    rank, task = options.torch_rank, TASKS[options.models[0]]
    copy, stage = divmod(rank, NUM_STAGES)
    torch.set_num_threads(1)
    patience = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"tcp://{options.store}", rank=rank, world_size=NUM_DEVICES, timeout=patience)
    pipelines = [dist.new_group([number * NUM_STAGES + one for one in range(NUM_STAGES)], timeout=patience) for number in range(NUM_COPIES)]
    copies = [dist.new_group([number * NUM_STAGES + one for number in range(NUM_COPIES)], timeout=patience) for one in range(NUM_STAGES)]
    model = task.make(dense=True, stretch=options.stretch)
    first = sum(task.sizes[:stage])
    layers = range(first, first + task.sizes[stage])
    module = nn.Sequential(*(build_layer(model.layers[layer], index=layer, seed=SEED) for layer in layers))
    parallel = DistributedDataParallel(
        module, process_group=copies[stage], bucket_cap_mb=options.bucket_mb[0], gradient_as_bucket_view=True, broadcast_buffers=False
    )
    optimizer = build_optimizer(OPTIMIZER, module.named_parameters())

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return model.loss(output, {"targets": targets})

    piece = PipelineStage(parallel, stage, NUM_STAGES, torch.device("cpu"), group=pipelines[copy])
    schedule = Schedule1F1B(piece, NUM_MICROBATCHES, loss_fn=loss)
    source = FileSource(options.data, LENGTH, 0, MICROBATCH_SIZE)("train")
    ended_s, losses = [time.perf_counter()], []
    for update in range(options.updates):
        numbers = range(update * NUM_MICROBATCHES, (update + 1) * NUM_MICROBATCHES)
        batches = [source.batch(number, (copy / NUM_COPIES, (copy + 1) / NUM_COPIES)) for number in numbers]
        inputs = [torch.cat([batch["tokens"] for batch in batches])] if stage == 0 else []
        targets = torch.cat([batch["targets"] for batch in batches]) if stage == NUM_STAGES - 1 else None
        found: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(*inputs, target=targets, losses=found, return_outputs=False)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.rate(update, num_updates=options.updates)
        optimizer.step()
        ended_s.append(time.perf_counter())
        losses.append(statistics.mean(float(each.detach()) for each in found) if found else None)
    print(json.dumps({"ended_s": ended_s, "losses": losses}))
    dist.destroy_process_group()


def train_torch(machines: Cluster, task: Task, data: str, *, stretch: float, bucket_mb: int, num_updates: int = NUM_UPDATES) -> Run:
    """Return what torch's schedule did, a process a node."""
    store = f"{machines.nodes[0].ip}:{TORCH_PORT}"
    settings = ["--models", task.name, "--data", data, "--store", store, "--updates", str(num_updates), "--bucket-mb", str(bucket_mb)]
    settings += ["--stretch", str(stretch)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                machines.start(
                    [sys.executable, str(Path(__file__).resolve()), *settings, "--torch-rank", str(rank)],
                    node=rank,
                    environment={"GLOO_SOCKET_IFNAME": "e0", "OMP_NUM_THREADS": "1"},
                )
            )
            for rank in range(NUM_DEVICES)
        ]
        done = [finish(process, what=f"torch's rank {rank}", timeout_s=TIMEOUT_S) for rank, process in enumerate(processes)]
    documents = [json.loads(each.stdout.splitlines()[-1]) for each in done]
    ends = range(0, num_updates + 1, UPDATES_PER_WINDOW)
    # An update has ended when it has on all devices; clocks of processes of one machine are one.
    ended_s = [max(document["ended_s"][update] for document in documents) for update in ends]
    windows_s = [(ended_s[number + 1] - ended_s[number]) / UPDATES_PER_WINDOW for number in range(len(ends) - 1)]
    last = [documents[copy * NUM_STAGES + NUM_STAGES - 1]["losses"] for copy in range(NUM_COPIES)]
    return Run(statistics.median(windows_s), [statistics.mean(of_copies) for of_copies in zip(*last, strict=True)])


# raypipe


def measured_profile(task: Task, model: Model, data: str) -> ModelProfile:
    """Return the profile of a model, whose layers are measured in this process."""
    torch.set_num_threads(1)
    batch = FileSource(data, LENGTH, 0, MICROBATCH_SIZE)("train").batch(0, (0.0, 1.0))
    measured = measure_layers(model, batch, optimizer=partial(build_optimizer, OPTIMIZER), seed=SEED)
    return model_profile([measured], model, name=task.name, microbatch_size=MICROBATCH_SIZE)


def stages_of(layers: Sequence[LayerProfile], sizes: Sequence[int]) -> list[Sequence[LayerProfile]]:
    """Return the layers of each stage."""
    ends = list(accumulate(sizes, initial=0))
    return [layers[first:end] for first, end in pairwise(ends)]


def sum_bytes(profile: ModelProfile, sizes: Sequence[int]) -> int:
    """Return the bytes of the first stage's gradients, less those that no update touches; with two copies, as many pass each port."""
    first = stages_of(profile.layers, sizes)[0]
    return sum(layer.parameter_bytes - layer.untouched_bytes(NUM_MICROBATCHES) for layer in first)


def order(name: str) -> Schedule:
    """Return a schedule's order of a window."""
    return build_schedule(
        name,
        num_devices=NUM_STAGES,
        num_microbatches=NUM_MICROBATCHES,
        num_updates=UPDATES_PER_WINDOW,
        update_scope=UpdateScope.STAGE,
    )


def undivided(schedule: Schedule) -> Schedule:
    """Return the order with the sums of each stage as one vector, behind its last backward."""
    return add_reductions(schedule, replicated_workers=range(NUM_STAGES))


def ports(bytes_per_s: float) -> ClusterTopology:
    """Return four nodes, all that leaves or enters each of which shares a rate."""
    topology = Cell("replicas", NUM_STAGES, NUM_COPIES, NUM_MICROBATCHES, sum_share=0.0, message_s=0.0).topology()
    return replace(topology, shared_links=tuple(replace(port, bandwidth_bytes_per_s=bytes_per_s) for port in topology.shared_links))


def hops_ahead(profile: ModelProfile, sizes: Sequence[int], *, compute_s: float, bytes_per_s: float) -> Sequence[int]:
    """Return the forwards ahead that the planner finds where a device computes so long in an update."""
    alone_s = max(sum(layer.forward_s + layer.backward_s for layer in layers) for layers in stages_of(profile.layers, sizes))
    slower = compute_s / (NUM_MICROBATCHES * alone_s / NUM_COPIES)
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * slower,
            backward_s=layer.backward_s * slower,
            weight_grad_s=layer.weight_grad_s and layer.weight_grad_s * slower,
        )
        for layer in profile.layers
    )
    problem = Problem(
        replace(profile, layers=layers),
        ports(bytes_per_s),
        NUM_MICROBATCHES,
        MICROBATCH_SIZE,
        updates_per_window=UPDATES_PER_WINDOW,
        max_staleness=1,
        update_scope=UpdateScope.STAGE,
    )
    workers = tuple(tuple(copy * NUM_STAGES + stage for copy in range(NUM_COPIES)) for stage in range(NUM_STAGES))
    evaluator = LayoutEvaluator(problem)
    found = with_forwards_ahead(evaluator, evaluator.simulate(Layout((0, sizes[0], sum(sizes)), workers, "pipedream-2bw")), most_steps=20)
    assert found is not None, "it was valid without"
    return found.layout.forwards_ahead


def config_of(
    machines: Cluster, task: Task, name: str, *, profile: ModelProfile, schedule: Schedule, transport: str, data: str, stretch: float
) -> Path:
    """Write the plan of an order over the four nodes, and the configuration of its run."""
    plan, config = (machines.folder / f"{task.name}-{name}.{ending}" for ending in ("json", "yaml"))
    nodes = [[f"node{copy * NUM_STAGES + stage}/0" for copy in range(NUM_COPIES)] for stage in range(NUM_STAGES)]
    workers = [[(device, 1 / NUM_COPIES) for device in of_stage] for of_stage in nodes]
    plan_of(profile, ports(1e9), schedule, workers, sizes=task.sizes, microbatch_size=MICROBATCH_SIZE).save(plan)
    dense = not any(layer.looked_up_bytes for layer in profile.layers)
    text = CONFIG.format(
        function=task.function,
        dense=str(dense).lower(),
        stretch=stretch,
        length=LENGTH,
        data=data,
        window=UPDATES_PER_WINDOW,
        transport=transport,
        plan=plan,
        name=f"{task.name}-{name}",
        folder=machines.folder,
        updates=NUM_UPDATES,
        seed=SEED,
    )
    config.write_text(text)
    return config


def train(machines: Cluster, config: Path) -> Run:
    """Return what a run of raypipe did."""
    done = machines.run([sys.executable, "-m", "raypipe", "train", str(config), "--json"], timeout_s=TIMEOUT_S)
    document = json.loads(done.stdout)
    trace = Trace.load(Path(document["path"]) / "trace.json")
    assert trace.steady_update_s is not None, "windows have several updates"
    exposed_s: dict[str, float] = {}
    for of_device in divide(trace).exposed_s:
        for carried, seconds in of_device.items():
            exposed_s[str(carried)] = exposed_s.get(str(carried), 0.0) + seconds / NUM_DEVICES / UPDATES_PER_WINDOW
    return Run(trace.steady_update_s, document["losses"], exposed_s)


def limit_ports(machines: Cluster, bytes_per_s: float) -> None:
    """Let all that leaves a node, and all that enters it, share a rate."""
    for node in range(NUM_DEVICES):
        others = [other for other in range(NUM_DEVICES) if other != node]
        machines.share([(node, other) for other in others], bytes_per_s)
        machines.share([(other, node) for other in others], bytes_per_s)


class Trial:
    """The systems of one model, on ports whose rate is set when they have run without a limit."""

    def __init__(self, machines: Cluster, task: Task, data: str, *, stretch: float) -> None:
        self.machines = machines
        self.task = task
        self.data = data
        self.stretch = stretch
        self.whole = measured_profile(task, task.make(dense=True), data)
        self.looks_up = any(layer.looked_up for layer in task.make(dense=False).layers)
        self.rows = measured_profile(task, task.make(dense=False), data) if self.looks_up else self.whole
        self.two_buffers, self.flushed = order("pipedream-2bw"), order("1f1b")

    def without_limit(self) -> dict[str, float]:
        """Return the seconds of an update where ports have no limit: C, and that of `b`."""
        late = self._raypipe("free", self.whole, late_updates(self.two_buffers), "tcp")
        return {"compute_s": late().update_s, "b": self._raypipe("free-b", self.whole, undivided(self.flushed), "gloo")().update_s}

    def _raypipe(self, name: str, profile: ModelProfile, schedule: Schedule, transport: str) -> Callable[[], Run]:
        write = partial(config_of, self.machines, self.task, name, profile=profile, schedule=schedule)
        return partial(train, self.machines, write(transport=transport, data=self.data, stretch=self.stretch))

    def figures(
        self, names: Sequence[str], bytes_per_s: float, *, free_s: Mapping[str, float], num_rounds: int, buckets_mb: Sequence[int]
    ) -> dict[str, Any]:
        """Return the figures of these systems where ports have this rate."""
        task, sizes, compute_s = self.task, self.task.sizes, free_s["compute_s"]
        limit_ports(self.machines, bytes_per_s)
        ahead = hops_ahead(self.rows, sizes, compute_s=compute_s, bytes_per_s=bytes_per_s)
        ours = late_updates(forwards_ahead(self.two_buffers, ahead))
        in_torch = partial(train_torch, self.machines, task, self.data, stretch=self.stretch)
        tried_mb = buckets_mb if "torch" in names and len(buckets_mb) > 1 else ()
        trials_s = {size: in_torch(bucket_mb=size, num_updates=UPDATES_PER_WINDOW).update_s for size in tried_mb}
        systems: dict[str, Callable[[], Run]] = {
            "a": self._raypipe("a", self.whole, undivided(self.two_buffers), "gloo"),
            "a'": self._raypipe("a-late", self.whole, undivided(late_updates(self.two_buffers)), "gloo"),
            "b": self._raypipe("b", self.whole, undivided(self.flushed), "gloo"),
            "c": self._raypipe("c", self.whole, self.two_buffers, "gloo"),
            "torch": partial(in_torch, bucket_mb=min(buckets_mb, key=lambda size: trials_s.get(size, 0.0))),
        }
        if self.looks_up:
            systems["dense"] = self._raypipe("dense", self.whole, ours, "tcp")
        systems["raypipe"] = self._raypipe("raypipe", self.rows, ours, "tcp")
        found = in_rounds({name: run for name, run in systems.items() if name in names}, num_rounds=num_rounds)
        seconds = {name: Summary.of([run.update_s for run in runs]) for name, runs in found.items()}
        losses = {name: runs[0].losses for name, runs in found.items()}
        messages = NUM_MICROBATCHES * self.whole.layers[sizes[0] - 1].output_bytes / NUM_COPIES
        possible_s = max(compute_s, (sum_bytes(self.rows, sizes) + messages) / bytes_per_s)
        two_buffers = [name for name in found if name not in {"b", "torch"}]
        return {
            "name": task.name,
            "stretch": self.stretch,
            "bytes_per_s": bytes_per_s,
            "compute_s": compute_s,
            "b_without_limit_s": free_s["b"],
            "sum_share": sum_bytes(self.whole, sizes) / bytes_per_s / compute_s,
            "messages_s": messages / bytes_per_s,
            "possible_s": possible_s,
            "forwards_ahead": ahead,
            "bucket_trials_s": trials_s,
            "update_s": seconds,
            "over": {name: each.median / seconds["raypipe"].median for name, each in seconds.items() if name != "raypipe"},
            "exposed_s": {name: mean_of([run.exposed_s for run in runs]) for name, runs in found.items()},
            "losses": losses,
            "losses_of_2bw_differ_by": spread([run.losses for name in two_buffers for run in found[name]]),
            "losses_of_1f1b_differ_by": spread([run.losses for name in {"b", "torch"} & set(found) for run in found[name]]),
        }


def mean_of(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each key."""
    keys = dict.fromkeys(key for each in values for key in each)
    return {key: statistics.mean(each.get(key, 0.0) for each in values) for key in keys}


def spread(runs: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of an update's loss between runs."""
    return max((max(of_update) - min(of_update) for of_update in zip(*runs, strict=True)), default=0.0)


def print_figures(figures: dict[str, Any], *, num_rounds: int) -> None:
    """Print the tables of one model."""
    compute_s, possible_s = figures["compute_s"], figures["possible_s"]
    # Where each device has a core of its own, the flush costs a pair of Ops of each stage but one.
    bubble = (NUM_MICROBATCHES + NUM_STAGES - 1) / NUM_MICROBATCHES
    stretch = f", stretched {figures['stretch']:g} times" if figures["stretch"] != 1.0 else ""
    title = (
        f"{figures['name']}{stretch}: C {1000 * compute_s:.0f} ms, ports of {8e-6 * figures['bytes_per_s']:.0f} Mbit/s, "
        f"A / C {figures['sum_share']:.2f}, messages {1000 * figures['messages_s']:.0f} ms an update, possible {1000 * possible_s:.0f} ms; "
        f"forwards ahead {' '.join(map(str, figures['forwards_ahead']))}. Without a limit of ports b takes "
        f"{figures['b_without_limit_s'] / compute_s:.2f} C ({bubble:.2f} where devices do not share cores). {num_rounds} rounds"
    )
    rows = [
        {
            "system": name,
            "ms": f"{1000 * each.median:.0f} +-{1000 * each.spread:.0f}",
            "over raypipe": f"{figures['over'].get(name, 1.0):.2f}",
            "over possible": f"{each.median / possible_s:.2f}",
            "exposed ms": ", ".join(f"{key} {1000 * value:.0f}" for key, value in sorted(figures["exposed_s"][name].items())),
            "first and last loss": f"{figures['losses'][name][0]:.6f} {figures['losses'][name][-1]:.6f}",
        }
        for name, each in figures["update_s"].items()
    ]
    print_table(title, rows)
    print(f"losses differ by up to {figures['losses_of_2bw_differ_by']:.1g} (2BW), {figures['losses_of_1f1b_differ_by']:.1g} (1F1B)\n")


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="raypipe runs in any case")
    parser.add_argument("--data", default="data/python-stdlib.parquet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=list(BUCKETS_MB), help="of DistributedDataParallel; all are tried")
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="CPU seconds of forwards and backwards count this many times, in all systems"
    )
    parser.add_argument("--without-limit", help="file of an earlier run's C, kept there by the first run that names it")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--torch-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--updates", type=int, default=NUM_UPDATES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark."""
    options = parsed()
    if options.torch_rank is not None:
        serve_torch(options)
        return 0
    data = str(Path(options.data).resolve())
    kept = Path(options.without_limit) if options.without_limit else None
    results = []
    with cluster(nodes=NUM_DEVICES, cpus_per_node=1) as machines:
        trials = {name: Trial(machines, TASKS[name], data, stretch=options.stretch) for name in dict.fromkeys(["gpt", *options.models])}
        free_s = json.loads(kept.read_text(encoding="utf-8")) if kept is not None and kept.exists() else {}
        free_s |= {name: trial.without_limit() for name, trial in trials.items() if name not in free_s}
        if kept is not None:
            kept.write_text(json.dumps(free_s), encoding="utf-8")
        bytes_per_s = sum_bytes(trials["gpt"].whole, TASKS["gpt"].sizes) / (SUM_SHARE * free_s["gpt"]["compute_s"])
        for name in options.models:
            figures = trials[name].figures(
                [*options.systems, "raypipe"],
                bytes_per_s * TASKS[name].rate,
                free_s=free_s[name],
                num_rounds=options.rounds,
                buckets_mb=options.bucket_mb,
            )
            print_figures(figures, num_rounds=options.rounds)
            results.append(figures)
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
