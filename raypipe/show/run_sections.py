"""What the page of a run has beside its timeline: loss and speed, stages and their layers, measured memory, configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Trace
from raypipe.show.page_tables import row, table
from raypipe.show.svg_document import escape, place
from raypipe.simulation.plan_cost import plan_cost
from raypipe.units import counted, seconds, size

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 180, 58, 22, 10
_MOST_POINTS = 400
_NUM_TICKS = 4
_MOST_NAMES = 6

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class RunData:
    """A run, for its page.

    Attributes:
        name: Name of its folder.
        plan: The plan that ran last.
        metrics: Lines of `metrics.jsonl`.
        config: Its configuration as YAML.
        trace: What it measured last; `None` before the first window.
        notes: Why it ended, and the like.
    """

    name: str
    plan: Plan
    metrics: Sequence[Mapping[str, Any]]
    config: str
    trace: Trace | None = None
    notes: Sequence[str] = ()

    def points(self, figure: str) -> list[tuple[int, float]]:
        """Return a figure by update; unknown ones are left out."""
        found = [(line["update"], line[figure]) for line in self.metrics if line.get(figure) is not None]
        return [(int(update), float(value)) for update, value in found if math.isfinite(value)]

    @property
    def speed(self) -> str:
        """Name of the figure of its speed: tokens, where the data has some."""
        return "tokens_per_s" if any(line.get("tokens_per_s") is not None for line in self.metrics) else "samples_per_s"

    @property
    def unit(self) -> str:
        """What its speed counts."""
        return "tokens/s" if self.speed == "tokens_per_s" else "rows/s"


def run_figures(run: RunData) -> list[tuple[str, str]]:
    """Return the figures at the top, as names and HTML."""
    losses, validations, speeds = run.points("loss"), run.points("validation_loss"), run.points(run.speed)
    figures: list[tuple[str, str]] = []
    for name, points in ((f"loss after {counted(losses[-1][0], 'update')}" if losses else "", losses), ("validation loss", validations)):
        if points:
            figures.append((name, f'<span class="soft">{points[0][1]:.4g} to</span> <b>{points[-1][1]:.4g}</b>'))
    if speeds:
        figures.append(("speed", f"<b>{speeds[-1][1]:,.0f}</b> {run.unit}"))
    return figures


def stages_section(run: RunData) -> Iterator[str]:
    """Yield the stages with devices, layers and memory."""
    plan, cost = run.plan, plan_cost(run.plan)
    predicted = plan.predicted.peak_memory_bytes if plan.predicted else ()
    measured = run.trace.peak_memory_bytes if run.trace is not None and run.trace.devices == plan.devices else ()
    at = {device: number for number, device in enumerate(plan.devices)}
    lines = []
    for stage, layers in enumerate(plan.cut.stages):
        names = [plan.profile.layers[layer].name for layer in layers]
        weights = sum(plan.profile.layers[layer].parameter_bytes for layer in layers)
        devices = list(dict.fromkeys(replica.device for pipe in plan.schedule.pipelines for replica in plan.workers[pipe[stage]]))
        times = cost.stages[at[devices[0]], stage]
        cells = [
            str(len(layers)),
            seconds(times.forward_s),
            seconds(times.backward_s),
            size(weights),
            *(_peak(peaks, [at[device] for device in devices]) for peaks in (predicted, measured)),
        ]
        lines.append(row([f"stage {stage}", _listed(devices), _listed(names)], cells))
    head = ["stage", "devices", "layers", "", "F", "B", "weights", "memory, predicted", "memory, measured"]
    yield '<section id="stages"><h2>Stages</h2>'
    yield f'<p class="soft">{escape(plan.schedule.name)}, planned by {escape(plan.planner)}. '
    yield "Times are those of a microbatch on one device; measured memory of a CPU slot is that of its process.</p>"
    yield table("", head, lines, num_text=3)
    yield "</section>"


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:2])}, ... {names[-1]}"


def _peak(peaks: Sequence[int], devices: Sequence[int]) -> str:
    return size(max(peaks[device] for device in devices)) if peaks else "-"


def training_section(run: RunData) -> Iterator[str]:
    """Yield the curves of loss and speed."""
    losses = run.points("loss")
    if not losses:
        return
    yield '<section id="training"><h2>Training</h2><div class="columns">'
    yield curve("loss", {"training": losses, "validation": run.points("validation_loss")})
    yield curve(run.unit, {"speed": run.points(run.speed)}, from_zero=True)
    yield "</div></section>"


def curve(title: str, lines: Mapping[str, Sequence[tuple[int, float]]], *, from_zero: bool = False) -> str:
    """Return lines over updates as SVG; of many updates, each point is the mean of several."""
    shown = {name: _thinned(points) for name, points in lines.items() if points}
    values = [value for points in shown.values() for _, value in points]
    updates = [update for points in shown.values() for update, _ in points]
    low, high = (0.0 if from_zero else min(values)), max(values)
    high = high if high > low else low + (abs(low) or 1.0)
    first, last = min(updates), max(*updates, min(updates) + 1)

    def x_of(update: float) -> float:
        return place(_LEFT + (update - first) / (last - first) * (_WIDTH - _LEFT - 8))

    def y_of(value: float) -> float:
        return place(_TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM))

    parts = [f'<figure class="curve"><figcaption class="soft">{escape(title)}</figcaption>']
    label = f"{title}: {', '.join(f'{name} {points[0][1]:.4g} to {points[-1][1]:.4g}' for name, points in shown.items())}"
    parts.append(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">')
    for number in range(_NUM_TICKS + 1):
        value = low + (high - low) * number / _NUM_TICKS
        parts.append(f'<path class="tick" d="M{_LEFT} {y_of(value)}H{_WIDTH - 8}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y_of(value) + 4}">{value:,.4g}</text>')
    for update, anchor in ((first, "start"), (last, "end")):
        parts.append(f'<text class="{anchor}" x="{x_of(update)}" y="{_HEIGHT - 5}">update {update}</text>')
    for number, points in enumerate(shown.values()):
        steps = "L".join(f"{x_of(update)} {y_of(value)}" for update, value in points)
        parts.append(f'<path class="line line-{number}" d="M{steps}"/>')
        if len(points) <= _MOST_POINTS // 10:
            parts += [f'<circle class="dot-{number}" cx="{x_of(update)}" cy="{y_of(value)}" r="2.5"/>' for update, value in points]
    parts.append("</svg>")
    if len(shown) > 1:
        names = enumerate(shown)
        parts.append('<p class="soft">' + " ".join(f'<span class="key-{number}">&#9644;</span> {escape(name)}' for number, name in names))
        parts.append("</p>")
    parts.append("</figure>")
    return "".join(parts)


def _thinned(points: Sequence[tuple[int, float]]) -> Points:
    each = -(-len(points) // _MOST_POINTS)
    groups = [points[start : start + each] for start in range(0, len(points), each)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def configuration_section(run: RunData) -> Iterator[str]:
    """Yield the configuration."""
    yield f"<details><summary>Configuration ({counted(len(run.config.splitlines()), 'line')})</summary>"
    yield f"<pre>{escape(run.config)}</pre></details>"
