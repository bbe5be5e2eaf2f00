"""One run of a small GPT over four nodes that is struck again and again, and what that costs.

    python benchmarks/chaos.py [--faults N | --kinds KIND ...] [--faults-anew K] [--calm SECONDS] [--every SECONDS] [--core-share PART]
                               [--device-ms MS] [--seed S] [--modes MODE ...] [--no-losses] [--json FILE]

as root, with iproute2.

Ray nodes in network namespaces, one stage each. In turn, at random moments and places:

    kill     a stage's process is killed
    stop     a stage's process is stopped and does not go on
    crash    all processes of a node end; it is back after some seconds
    cut      nothing gets into or out of a node for 20 s; if Ray has given it up by then, it is started again
    sever    nothing passes between two nodes, which reach all others, for 20 s
    disk     the disk of the run's folder is full for some seconds
    driver   the driver's process is killed and started again with `--resume auto`
    link     two nodes never reach each other again (once, the last fault)

The same faults strike a run that recovers by itself, and one whose workers all start anew from the last checkpoint, as frameworks do
that know nothing of the stages: same plan, same driver, same checkpoints (every 20 s of training). That one waits for devices that are
missing. It takes about twice as long: `--faults-anew K` ends it after the first K faults, beside which stands the other way's goodput
over these same K. `--kinds` are the faults in order, instead of all kinds at random; `--no-losses` leaves out the run without faults.
`--modes` names the ways: `recover`, `restart`, and `spares` and `no-spares`, which recover with spare processes everywhere or nowhere.

A fault strikes so many seconds (`--calm`) after training goes on behind the last one; with `--every`, by the clock: at the same moments
for both ways, unless the last fault is not over `--calm` seconds before. With `--core-share 0.5` each node has half a core for itself, so
that what a node that comes back computes takes nothing from the others. With `--device-ms 1` each layer
waits a millisecond for each row in its forward, and two in its backward, as for a GPU: its node's core is idle meanwhile.

For each way: goodput (updates that stayed over those that were possible), what each kind of fault took until the next new update, and the
difference of the losses from those of a run without faults. Possible are as many updates as either way did in its quickest 20 seconds in a
row before the first fault: both begin with the same plan, and what a plan without a link or a device may gain is no loss of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rounds import print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cluster and the run are those of the tests

from raypipe.data.prepare import prepare
from tests.multinode.cluster import Cluster, cluster
from tests.multinode.network import NetworkError

LOSSES = {"kill", "stop", "crash"}  # of processes, which every run misses sooner or later
KINDS = ("kill", "stop", "crash", "cut", "sever", "disk", "driver")
MODES = ("recover", "spares", "no-spares", "restart")
NUM_NODES = 4
NUM_UPDATES = 1_000_000  # never reached: the rate depends on it
SPREAD_S = 4.0  # by which the calm between two faults differs
AWAY_S = 10.0
CUT_S = 20.0
PATIENCE_S = 180.0
DISK_BYTES = 96 << 20
_QUICKEST_S = 20.0


@dataclass
class Struck:
    """What a fault did.

    Attributes:
        noticed_s: From the fault to the run's word about it; `None` if it said nothing.
        lost_s: From the fault to the first update that had not been done before.
        again_s: From the fault to the first update, which may have been done before.
        at_s: When it struck, in seconds since the epoch.
        end_s: When training went on, in the same.
        updates: The updates that were done by then.
    """

    kind: str
    place: str
    noticed_s: float | None = None
    lost_s: float | None = None
    again_s: float | None = None
    at_s: float = 0.0
    end_s: float = 0.0
    updates: int = 0
    said: list[str] = field(default_factory=list)


class Run:
    """A driver, started again when it is killed, and what it says."""

    def __init__(self, machines: Cluster, arguments: list[str]) -> None:
        self.machines, self.arguments = machines, arguments
        self.updates: list[tuple[float, int, float]] = []  # at, update, seconds of an update
        self.notices: list[tuple[float, str]] = []
        self.problem = ""
        self._stack = contextlib.ExitStack()
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def start(self) -> None:
        """Start the driver."""
        command = [sys.executable, "-m", "tests.multinode.chaos_run", *self.arguments]
        self.process = self._stack.enter_context(self.machines.start(command))
        threading.Thread(target=self._read, args=[self.process], daemon=True).start()
        threading.Thread(target=self._drain, args=[self.process], daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in process.stdout:
                if line.startswith("{"):
                    self._lines.put(json.loads(line))
        self._lines.put(None)

    def _drain(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):
            for line in process.stderr:
                self.problem = (self.problem + line)[-3000:]

    def kill(self) -> None:
        """Kill the driver as a machine's memory killer would."""
        for pid in self.machines.pids(0):
            with contextlib.suppress(OSError):
                if b"tests.multinode.chaos_run" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=20)

    @property
    def done(self) -> int:
        """The most updates that were done."""
        return max((update for _, update, _ in self.updates), default=0)

    def has_done(self, num_updates: int) -> Callable[[], bool]:
        """Whether so many updates are done, whenever it is asked."""
        return lambda: self.done >= num_updates

    def watch(self, *, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Read what the run says for so long, or until something holds; return whether it does."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left_s)
            except queue.Empty:
                return False
            if line is None:
                if self.process.poll() is not None and self.process.returncode != -signal.SIGKILL and self._lines.empty():
                    raise SystemExit(f"the run ended by itself:\n{self.notices[-5:]}\n{self.problem}")
            elif "update" in line:
                self.updates.append((line["at_s"], line["update"], line["update_s"]))
            else:
                self.notices.append((line["at_s"], line["notice"]))
            if until():
                return True
        return False

    def end(self) -> None:
        """End the driver."""
        self._stack.close()


class Chaos:
    """Strikes a run, and mends what it broke."""

    def __init__(self, machines: Cluster, run: Run, storage: Path, *, seed: int, calm_s: float, every_s: float) -> None:
        self.machines, self.run, self.storage, self.calm_s, self.every_s = machines, run, storage, calm_s, every_s
        self.begin_s = time.time()
        self.chance = random.Random(seed)
        self.struck: list[Struck] = []

    def strike(self, kind: str) -> None:
        """Strike once, and go on when the run does."""
        run, chance = self.run, self.chance
        node, others = chance.randrange(NUM_NODES), chance.sample(range(1, NUM_NODES), 2)
        self.rest()
        run.watch(seconds=chance.uniform(0.0, SPREAD_S))
        # The head of the cluster and the driver are on node 0. A device that is back is used only behind a window: what would be lost is
        # chosen among those that compute.
        place = {"kill": node, "stop": node, "crash": others[0], "cut": others[0]}.get(kind)
        if kind in LOSSES:
            place = self._computing(others if kind == "crash" else [node, *range(NUM_NODES)])
        hit = Struck(kind, str(place if place is not None else others if kind in {"sever", "link"} else "-"))
        before, since_s = run.done, time.time()
        hit.at_s = since_s

        def is_back() -> bool:
            told = [at for at, text in run.notices if at > since_s and ("failure" in text or "anew" in text)]
            hit.noticed_s = min(told, default=since_s) - since_s if told else None
            # What had been computed before the fault does not count, nor does a process that is lost and not missed yet.
            behind_s = since_s if hit.noticed_s is None else since_s + hit.noticed_s
            if kind == "driver":
                behind_s = min((at for at, text in run.notices if at > since_s and "training updates" in text), default=math.inf)
            behind = [(at, update) for at, update, _ in run.updates if at > behind_s]
            later = [at for at, update in behind if update > before]
            hit.lost_s = later[0] - since_s if later and not (kind in LOSSES and hit.noticed_s is None) else None
            hit.again_s = behind[0][0] - since_s if hit.lost_s is not None else None
            return hit.lost_s is not None

        mend = getattr(self, f"_{kind}")(place if place is not None else others)
        away_s = CUT_S if kind in {"cut", "sever"} else AWAY_S
        goes_on = run.watch(seconds=PATIENCE_S if mend is None else away_s, until=is_back)
        if mend is not None:
            run.watch(seconds=max(since_s + away_s - time.time(), 0.0))
            mend()
            goes_on = is_back() or run.watch(seconds=PATIENCE_S, until=is_back)
        hit.said = [f"{at - since_s:.1f} s: {text[:300]}" for at, text in run.notices if at > since_s]
        hit.end_s, hit.updates = run.updates[-1][0], run.done
        self.struck.append(hit)
        print(f"{len(self.struck)}: {kind} {hit.place}: noticed {hit.noticed_s}, next update {hit.lost_s}", file=sys.stderr, flush=True)
        if not goes_on:
            raise SystemExit(f"no update within {PATIENCE_S:g} s after {hit}\n{run.problem}")

    def rest(self) -> None:
        """Let the run go on until the next fault is due."""
        due_s = self.begin_s + self.every_s * (len(self.struck) + 1)
        self.run.watch(seconds=max(self.calm_s, due_s - time.time()))

    def _kill(self, node: int) -> None:
        self._signal(node, signal.SIGKILL)

    def _stop(self, node: int) -> None:
        self._signal(node, signal.SIGSTOP)

    def _signal(self, node: int, number: int) -> None:
        os.kill(self.chance.choice(self._stages(node, within_s=PATIENCE_S)), number)

    def _stages(self, node: int, *, within_s: float) -> list[int]:
        # The title of a process names the newest of the calls that it serves, which is not always its window.
        return self.machines.processes(node, r"ray::\w+\.run", within_s=within_s)

    def _computing(self, nodes: Sequence[int]) -> int:
        """The first of some nodes on which a stage computes."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for at in nodes:
                if self._stages(at, within_s=1.0 if at == nodes[0] else 0.0):
                    return at
        raise SystemExit(f"no stage computed for {PATIENCE_S:g} s\n{self.run.problem}")

    def _crash(self, node: int) -> Any:
        self.machines.crash(node)
        return lambda: self._start_node(node)

    def _start_node(self, node: int) -> None:
        # On a busy machine Ray may take longer than it allows itself.
        for attempt in range(4):
            try:
                self.machines.start_node(node, num_cpus=1)
            except NetworkError:
                if attempt == 3:
                    raise
                self.machines.crash(node)
            else:
                return

    def _cut(self, node: int) -> Any:
        self.machines.cut(node)

        def mend() -> None:
            self.machines.mend(node)
            time.sleep(2.0)
            if node not in self.machines.alive():
                self.machines.crash(node)
                self._start_node(node)

        return mend

    def _sever(self, nodes: list[int]) -> Any:
        self.machines.sever(*nodes)
        return lambda: self.machines.rejoin(*nodes)

    def _link(self, nodes: list[int]) -> None:
        self.machines.sever(*nodes)

    def _disk(self, _: object) -> Any:
        filler = self.storage / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        return filler.unlink

    def _driver(self, _: object) -> None:
        self.run.kill()
        self.run.start()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of some megabytes."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def losses_of(storage: Path) -> list[float]:
    """The losses that a run has written, by update."""
    lines = [json.loads(line) for line in (storage / "run" / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    found = {line["update"]: line["loss"] for line in lines if "loss" in line}
    assert sorted(found) == list(range(1, len(found) + 1)), "an update is missing, or there twice"
    return [found[update] for update in sorted(found)]


def run_with_faults(
    mode: str, folder: Path, tokens: Path, plan: Path, kinds: list[str], arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[float]]:
    """Strike a run; return its figures, and its losses."""
    with small_disk(folder / mode) as storage, cluster(nodes=NUM_NODES, cpus_per_node=1, core_share=arguments.core_share) as machines:
        run = Run(machines, [str(storage), str(tokens), str(NUM_UPDATES), mode, str(arguments.device_ms), str(plan)])
        run.start()
        try:
            run.watch(seconds=PATIENCE_S, until=run.has_done(5))
            run.watch(seconds=10.0)
            chaos = Chaos(machines, run, storage, seed=arguments.seed, calm_s=arguments.calm, every_s=arguments.every)
            (begin_s, first, _) = run.updates[-1]
            for kind in kinds:
                chaos.strike(kind)
            chaos.rest()
            end_s, last, _ = run.updates[-1]
        finally:
            run.end()
        figures = {
            "mode": mode,
            "core_share": arguments.core_share,
            "device_ms": arguments.device_ms,
            "faults": len(kinds),
            "updates": last - first,
            "seconds": end_s - begin_s,
            "update_s": undisturbed_s([(at_s, update) for at_s, update, _ in run.updates if at_s <= chaos.struck[0].at_s]),
            # Updates of each second until the end, and until each fault was over.
            "rate": (last - first) / (end_s - begin_s),
            "rate_so_far": [(hit.updates - first) / (hit.end_s - begin_s) for hit in chaos.struck],
            "struck": [vars(hit) | {"said": [text.replace(f"{storage}/", "") for text in hit.said]} for hit in chaos.struck],
            # Seconds since the first of these updates; then what was said, or a window's last update and the seconds of one of its updates.
            "notices": [(round(at_s - begin_s, 2), text.replace(f"{storage}/", "")[:300]) for at_s, text in run.notices],
            "windows": [(round(at_s - begin_s, 2), update, round(seconds, 4)) for at_s, update, seconds in run.updates],
        }
        return figures, losses_of(storage)


def undisturbed_s(done: list[tuple[float, int]]) -> float:
    """The seconds of an update in the quickest stretch of `_QUICKEST_S`, or of all; `done` has moments, and the updates by then."""
    length_s = min(_QUICKEST_S, done[-1][0] - done[0][0]) if done else 0.0
    stretches = (
        (later[0] - begin_s, later[1] - first)
        for number, (begin_s, first) in enumerate(done)
        if (later := next((behind for behind in done[number:] if behind[0] - begin_s >= length_s), None)) is not None
    )
    found = [seconds / updates for seconds, updates in stretches if updates > 0]
    if not found:
        raise SystemExit("no two updates were done before the first fault; use a larger --calm")
    return min(found)


def calm_losses(
    folder: Path, tokens: Path, *, num_updates: int, plan: Path | None, arguments: argparse.Namespace
) -> tuple[list[float], Path]:
    """The losses of a run without faults, and the plan that it followed."""
    storage = folder / ("calm" if plan else "first")
    with cluster(nodes=NUM_NODES, cpus_per_node=1, core_share=arguments.core_share) as machines:
        run = Run(
            machines, [str(storage), str(tokens), str(NUM_UPDATES), "recover", str(arguments.device_ms), *([str(plan)] if plan else [])]
        )
        run.start()
        try:
            if not run.watch(seconds=3600.0, until=run.has_done(num_updates)):
                raise SystemExit(f"the run without faults is too slow:\n{run.problem}")
        finally:
            run.end()
    return losses_of(storage), storage / "run" / "plan.json"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help="the faults in order, and no lost link behind them")
    parser.add_argument("--no-losses", action="store_true", help="do not compare the losses with those of a run without faults")
    parser.add_argument("--faults-anew", type=int, metavar="K", help="end the way that starts anew after so many faults")
    parser.add_argument("--calm", type=float, default=6.0, help="seconds of undisturbed training before each fault, at least")
    parser.add_argument("--every", type=float, default=0.0, metavar="SECONDS", help="strike by the clock, behind --calm at the earliest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["recover", "restart"], help="spares, no-spares: with them everywhere, or nowhere"
    )
    parser.add_argument("--core-share", type=float, metavar="PART", help="part of a core that each node has for itself")
    parser.add_argument("--device-ms", type=float, default=0.0, metavar="MS", help="milliseconds for which a layer waits for a row")
    parser.add_argument("--json", help="file for all values")
    arguments = parser.parse_args()
    kinds = arguments.kinds or [KINDS[number % len(KINDS)] for number in range(arguments.faults - 1)]
    if not arguments.kinds:
        random.Random(arguments.seed).shuffle(kinds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = folder / "tokens.parquet"
        prepare(str(Path(__file__).resolve().parents[1] / "docs"), output=tokens, validation_fraction=0.1)
        _, plan = calm_losses(folder, tokens, num_updates=10, plan=None, arguments=arguments)
        found = {}
        for mode in arguments.modes:
            # Who does not plan anew cannot do without a link.
            last = [] if arguments.kinds else ["link"]
            struck = kinds[: arguments.faults_anew] if mode == "restart" else [*kinds, *last]
            found[mode] = run_with_faults(mode, folder, tokens, plan, struck, arguments)
        num_updates = max(len(losses) for _, losses in found.values())
        calm = [] if arguments.no_losses else calm_losses(folder, tokens, num_updates=num_updates, plan=plan, arguments=arguments)[0]
    rows, document = [], []
    possible_s = min(figures["update_s"] for figures, _ in found.values())
    for figures, _ in found.values():
        # Behind each fault: what it would be if the run ended there.
        goodput_so_far = [rate * possible_s for rate in figures.pop("rate_so_far")]
        figures |= {"possible_update_s": possible_s, "goodput": figures.pop("rate") * possible_s, "goodput_so_far": goodput_so_far}
    alike = min(len(figures["goodput_so_far"]) for figures, _ in found.values())
    for mode, (figures, losses) in found.items():
        differences = [abs(ours - theirs) for ours, theirs in zip(losses, calm, strict=False)]
        # Rounding alone grows with the updates (`rounding_drift.py`); a step in these would be a fault of the recovery.
        by_thousand = [max(differences[at : at + 1000]) for at in range(0, len(differences), 1000)] or [math.nan]
        figures |= {"equal_bits": sum(difference == 0.0 for difference in differences), "largest_differences_by_1000": by_thousand}
        document.append(figures)
        rows.append({
            "way": mode,
            "faults": str(figures["faults"]),
            "updates": str(figures["updates"]),
            "goodput": f"{figures['goodput']:.2f}",
            "time lost": f"{1 - figures['goodput']:.2f}",
            f"time lost, first {alike} faults": f"{1 - figures['goodput_so_far'][alike - 1]:.2f}",
            "a fault": f"{(1 - figures['goodput']) * figures['seconds'] / figures['faults']:.1f} s",
            "equal to the last bit": f"{figures['equal_bits']} of {len(differences)}",
            "largest difference, first and last 1,000 updates": f"{by_thousand[0]:.1e}, {by_thousand[-1]:.1e}",
        })
    print_table("runs", rows)
    print_table("seconds from a fault to the next new update, in the median (and until it was noticed)", list(by_kind(document)))
    print_table("seconds from the notice to an update, over those of a driver started again with `--resume auto`", list(shares(document)))
    write_json(arguments.json, document)


def by_kind(document: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """One line for each kind of fault."""
    for kind in (*KINDS, "link"):
        row = {"fault": kind}
        for figures in document:
            hits = [hit for hit in figures["struck"] if hit["kind"] == kind]
            lost = [hit["lost_s"] for hit in hits if hit["lost_s"] is not None]
            noticed = [hit["noticed_s"] for hit in hits if hit["noticed_s"] is not None]
            text = f"{statistics.median(lost):.1f}" if lost else "-"
            row[figures["mode"]] = text + (f" ({statistics.median(noticed):.1f})" if noticed else "")
        yield row


def shares(document: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """One line for each way and until what: the next new update, or the next update, which may have been done before."""
    for figures in document:
        for until, words in (("lost_s", "the next new update"), ("again_s", "the next update")):
            resumed = [hit[until] for hit in figures["struck"] if hit["kind"] == "driver" and hit[until] is not None]
            row = {"way": figures["mode"], "until": words, "started again": f"{statistics.median(resumed):.1f} s" if resumed else "-"}
            for kind in KINDS:
                hits = [hit for hit in figures["struck"] if hit["kind"] == kind and hit[until] is not None and hit["noticed_s"] is not None]
                took = [hit[until] - hit["noticed_s"] for hit in hits]
                row[kind] = f"{statistics.median(took) / statistics.median(resumed):.2f}" if took and resumed else "-"
            yield row


if __name__ == "__main__":
    main()
