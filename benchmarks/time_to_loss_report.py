"""Tables and curves of the cells of `time_to_loss.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from statistics import fmean, stdev
from typing import Any

from curves import Curve, Panel, draw
from time_to_loss_runs import SCHEDULED, Scheduled, Store, delays_of, synchronous_delays, without_corrections

Rows = list[dict[str, str]]
_SMOOTHED = 15
"""Updates over which training losses are averaged in drawings."""
_MOST_DRAWN = 4


@dataclass(frozen=True)
class Found:
    """What has been computed for runs of some length."""

    store: Store
    num_updates: int

    def curves(self, task: str, optimizer: str, num_updates: int | None = None) -> list[dict[str, Any]]:
        """Return the curves of a task and optimizer."""
        wanted = {"task": task, "optimizer": optimizer, "num_updates": num_updates or self.num_updates}
        cells = ({"synchronous_updates": 0} | cell for cell in self.store.all("losses").values())
        return [cell for cell in cells if wanted.items() <= cell.items()]

    def losses(
        self, task: str, optimizer: str, rate: float, delays: str, start: int = 0, *, num_updates: int | None = None
    ) -> dict[int, float]:
        """Return the last validation loss of each seed; `start` is the number of synchronous updates."""
        wanted = {"learning_rate": rate, "delays": delays, "synchronous_updates": start}
        if delays == synchronous_delays(self.store, task):
            optimizer = without_corrections(optimizer)
        return {cell["seed"]: last(cell) for cell in self.curves(task, optimizer, num_updates) if wanted.items() <= cell.items()}

    def on_time(self, task: str, optimizer: str, rate: float, delays: str) -> dict[int, float]:
        """Return the losses of the same order with all updates drained, or else of any synchronous one.

        Orders that divide rows into other microbatches round otherwise, which alone moves runs apart.
        """
        drained = self.losses(task, optimizer, rate, delays, self.num_updates)
        return self.losses(task, optimizer, rate, synchronous_delays(self.store, task)) | drained

    def best_rate(self, task: str, optimizer: str) -> float | None:
        """Return the rate with the least synchronous loss of seed 0."""
        without = synchronous_delays(self.store, task)
        curves = self.curves(task, without_corrections(optimizer))
        found = {c["learning_rate"]: last(c) for c in curves if (c["delays"], c["seed"]) == (without, 0)}
        return min(found, key=found.__getitem__, default=None)

    def optimizers(self, task: str) -> list[str]:
        """Return the optimizers with curves."""
        return list(dict.fromkeys(cell["optimizer"] for cell in self.store.all("losses").values() if cell["task"] == task))

    @cached_property
    def _seconds(self) -> dict[str, Any]:
        return self.store.all("seconds")

    def seconds(self, task: str, layers_of: str) -> dict[Scheduled, dict[str, Any]]:
        """Return what is known of each simulated schedule."""
        keys = {each: f"{task}-{layers_of}-{str(each).replace(' ', '-')}" for each in SCHEDULED}
        return {each: self._seconds[key] for each, key in keys.items() if key in self._seconds}

    def starts(self, task: str, optimizer: str, delays: str) -> list[int]:
        """Return the numbers of synchronous updates of the late curves with these delays, at the best rate."""
        rate = self.best_rate(task, optimizer)
        curves = [cell for cell in self.curves(task, optimizer) if (cell["learning_rate"], cell["delays"]) == (rate, delays)]
        return sorted({cell["synchronous_updates"] for cell in curves} - {self.num_updates})

    def mean_update_s(self, cell: dict[str, Any], start: int) -> float:
        """Return the mean seconds of an update of a run whose first `start` updates are drained."""
        late = self.num_updates - start
        return float(start * cell["drained_s"] + late * cell["update_s"]) / self.num_updates

    def more_updates(self, task: str, optimizer: str, delays: str, start: int = 0, *, of_same_order: bool = False) -> float | None:
        """Return how many times as many updates a late schedule needs for the synchronous loss: exp(difference / b), L = a - b ln N.

        The difference is that to the synchronous losses, or to those `on_time`.
        """
        rate, without = self.best_rate(task, optimizer), synchronous_delays(self.store, task)
        if rate is None:
            return None
        late, synchronous = self.losses(task, optimizer, rate, delays, start), self.losses(task, optimizer, rate, without)
        base = self.on_time(task, optimizer, rate, delays) if of_same_order else synchronous
        half = self.losses(task, optimizer, rate, without, num_updates=self.num_updates // 2)
        seeds = late.keys() & base.keys()
        if not seeds or 0 not in half or 0 not in synchronous:
            return None
        slope = (half[0] - synchronous[0]) / math.log(2)
        return math.exp(fmean(late[seed] - base[seed] for seed in seeds) / slope)


def last(cell: dict[str, Any]) -> float:
    """Return the validation loss at the end."""
    loss: float = list(cell["validation"].values())[-1]
    return loss if math.isfinite(loss) else math.inf


def tables(found: Found, task: str, layers_of: str) -> Iterator[tuple[str, Rows]]:
    """Yield the title and the rows of each table."""
    yield f"{task}: seconds of an update, simulated, each schedule on its own best cut", _seconds(found, task, layers_of)
    yield f"{task}: validation loss after {found.num_updates} updates", _losses(found, task)
    for optimizer in found.optimizers(task):
        yield (
            f"{task}, {optimizer}: the loss of the fastest synchronous schedule, how much sooner",
            _sooner(found, task, optimizer, layers_of),
        )


def fastest(seconds: dict[Scheduled, dict[str, Any]], *, synchronous: bool) -> Scheduled | None:
    """Return the schedule with the shortest update."""
    of_kind = [each for each in seconds if each.is_synchronous is synchronous]
    return min(of_kind, key=lambda each: float(seconds[each]["update_s"]), default=None)


def _seconds(found: Found, task: str, layers_of: str) -> Rows:
    seconds = found.seconds(task, layers_of)
    rehearsals = found.store.all("rehearsed")
    best = fastest(seconds, synchronous=True)
    rows: Rows = []
    for each, cell in seconds.items():
        rehearsal = rehearsals.get(f"{task}-{layers_of}-{str(each).replace(' ', '-')}")
        rows.append({
            "schedule": str(each),
            "update s": f"{cell['update_s']:.4f}",
            "best synchronous / it": f"{seconds[best]['update_s'] / cell['update_s']:.3f}" if best else "",
            "rehearsed / simulated": f"{rehearsal['rehearsed_s'] / rehearsal['predicted_s']:.3f}" if rehearsal else "",
            "bubble": f"{cell['bubble']:.1%}",
            "mean delay": f"{delays_of(found.store.folder, cell['delays']).mean_delay:.3f}",
            "cut": " ".join(map(str, cell["sizes"])),
        })
    return rows


def _losses(found: Found, task: str) -> Rows:
    without = synchronous_delays(found.store, task)
    rows: Rows = []
    for optimizer in found.optimizers(task):
        curves = found.curves(task, optimizer)
        best = found.best_rate(task, optimizer)
        keys = {(cell["learning_rate"], cell["delays"], cell["synchronous_updates"]) for cell in curves}
        for rate, delays, start in sorted(keys, key=lambda key: (key[0], key[1] != without, key)):
            losses, synchronous = found.losses(task, optimizer, rate, delays, start), found.losses(task, optimizer, rate, without)
            differences = [losses[seed] / synchronous[seed] - 1 for seed in sorted(losses.keys() & synchronous.keys())]
            spread = f" +-{stdev(differences):.2%}" if len(differences) > 1 else ""
            more = found.more_updates(task, optimizer, delays, start) if rate == best else None
            rows.append({
                "optimizer": optimizer,
                "rate": f"{rate:g}" + (" *" if rate == best else ""),
                "delays of": ", ".join(map(str, _named(found, task, delays))) or "synchronous",
                "mean delay": f"{delays_of(found.store.folder, delays).mean_delay:.3f}",
                "on time": f"{start} of {found.num_updates}" if delays != without else "",
                "losses by seed": " ".join(f"{losses[seed]:.4f}" for seed in sorted(losses)),
                "over synchronous": f"{fmean(differences):+.2%}{spread}" if differences and delays != without else "",
                "updates, times": f"{more:.3f}" if more is not None and delays != without else "",
            })
    return rows


def _named(found: Found, task: str, delays: str) -> list[Scheduled]:
    cells = {key: cell for key, cell in found.store.all("seconds").items() if cell["delays"] == delays}
    return [each for each in SCHEDULED if not each.is_synchronous and any(_is_of(key, task, each) for key in cells)]


def _is_of(key: str, task: str, scheduled: Scheduled) -> bool:
    return key.startswith(f"{task}-") and key.endswith(f"-{str(scheduled).replace(' ', '-')}")


@dataclass(frozen=True)
class _Late:
    """An asynchronous schedule with an optimizer and a number of synchronous updates, beside the fastest synchronous schedule.

    Attributes:
        faster: Times as fast as that one in a mean update.
        more: Times as many updates to the same loss.
    """

    scheduled: Scheduled
    optimizer: str
    start: int
    faster: float
    more: float

    @property
    def sooner(self) -> float:
        """Times as soon at the same loss."""
        return self.faster / self.more


def _late(found: Found, task: str, optimizer: str, layers_of: str) -> list[_Late]:
    """Return what is known of an optimizer, the soonest first."""
    seconds = found.seconds(task, layers_of)
    best = fastest(seconds, synchronous=True)
    rows = []
    for each, cell in seconds.items():
        for start in () if each.is_synchronous else found.starts(task, optimizer, cell["delays"]):
            more = found.more_updates(task, optimizer, cell["delays"], start)
            if best is not None and more is not None:
                rows.append(_Late(each, optimizer, start, seconds[best]["update_s"] / found.mean_update_s(cell, start), more))
    return sorted(rows, key=lambda row: row.sooner, reverse=True)


def _sooner(found: Found, task: str, optimizer: str, layers_of: str) -> Rows:
    best = fastest(found.seconds(task, layers_of), synchronous=True)
    return [
        {
            "schedule": str(late.scheduled),
            "on time": f"{late.start} of {found.num_updates}",
            f"an update, times as fast as {best}": f"{late.faster:.3f}",
            "updates for the same loss, times": f"{late.more:.3f}",
            "same loss, times as soon": f"{late.sooner:.3f}",
        }
        for late in _late(found, task, optimizer, layers_of)
    ]


def figure(found: Found, tasks: Sequence[str], layers_of: str) -> str:
    """Return the curves of the optimizer with the least synchronous loss over simulated seconds, as SVG."""
    panels = []
    for task in tasks:
        curves = dict(islice(_drawn(found, task, layers_of), 1 + _MOST_DRAWN))
        if len(curves) > 1:  # one alone compares nothing
            ends = [y for curve in curves.values() for _, y in curve]
            panels.append(Panel(f"{task}, seed 0: training loss", "simulated seconds", curves, min(ends), min(ends) * 1.35))
    return draw(panels)


def _drawn(found: Found, task: str, layers_of: str) -> Iterator[tuple[str, Curve]]:
    seconds, without = found.seconds(task, layers_of), synchronous_delays(found.store, task)
    known = {optimizer: rate for optimizer in found.optimizers(task) if (rate := found.best_rate(task, optimizer)) is not None}
    losses = {optimizer: found.losses(task, optimizer, rate, without).get(0, math.inf) for optimizer, rate in known.items()}
    if (least := min(losses.values(), default=None)) is None or (best := fastest(seconds, synchronous=True)) is None:
        return
    # Corrections change nothing on time, so that several optimizers may share the least loss.
    optimizers = [optimizer for optimizer, loss in losses.items() if loss == least]
    late = sorted((row for each in optimizers for row in _late(found, task, each, layers_of)), key=lambda row: row.sooner, reverse=True)
    (curve,) = _of_seed_0(found, task, without_corrections(optimizers[0]), without, 0)
    yield f"{best}, {without_corrections(optimizers[0])}", [(number * seconds[best]["update_s"], loss) for number, loss in _smoothed(curve)]
    drawn = set()
    for row in late:
        cell = seconds[row.scheduled]
        if (key := (cell["delays"], row.start)) in drawn:
            continue  # of schedules with one curve, the soonest
        drawn.add(key)
        for curve in _of_seed_0(found, task, row.optimizer, cell["delays"], row.start):
            name = f"{row.scheduled}, {row.start} updates on time"
            more_s = row.start * (cell["drained_s"] - cell["update_s"])
            yield name, [(number * cell["update_s"] + more_s, loss) for number, loss in _smoothed(curve) if number >= row.start]


def _of_seed_0(found: Found, task: str, optimizer: str, delays: str, start: int) -> list[list[float]]:
    wanted = {"learning_rate": found.best_rate(task, optimizer), "seed": 0, "delays": delays, "synchronous_updates": start}
    return [cell["losses"] for cell in found.curves(task, optimizer) if wanted.items() <= cell.items()]


def _smoothed(losses: Sequence[float]) -> list[tuple[int, float]]:
    return [(end, fmean(losses[end - _SMOOTHED : end])) for end in range(_SMOOTHED, len(losses) + 1)]
