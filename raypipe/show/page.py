"""Traces as one HTML page, of `page.html`, `page.css` and three scripts, which draw the timeline from the JSON of `page_data.py`.

Nothing in a trace can act on the page: text is escaped, and a content policy allows one script and one style and no loading.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from string import Template

from raypipe import __version__
from raypipe.analysis.idle import IDLE, Cause
from raypipe.artifacts.trace import SpanKind, Trace
from raypipe.schedules.ir import OpKind
from raypipe.show.causes import MEANINGS, device_words, findings
from raypipe.show.differences import differences, header, rows
from raypipe.show.labels import Labels, colour, pipeline_words
from raypipe.show.page_data import page_data
from raypipe.show.page_tables import comparison_tables, idle_table, wait_tables
from raypipe.show.svg_document import escape
from raypipe.show.view import CAUSES, View, has_memory, part_s, part_words, parts_of, views_of
from raypipe.units import counted, ratio, seconds, size

_SCRIPTS = ("page_read.js", "page_draw.js", "page_pointer.js")  # one script, in this order


def draw_page(traces: Sequence[Trace]) -> str:
    """Draw one trace, or two with their differences."""
    views = views_of(traces)
    title = escape(" and ".join(dict.fromkeys(view.trace.name or "trace" for view in views)))
    style, script = _file("page.css"), "".join(map(_file, _SCRIPTS))
    style += "".join(f"\n.fill-{kind} {{ fill: {colour(kind)}; }}" for kind in OpKind)
    style += "".join(f"\n.fill-{cause} {{ fill: url(#p-{cause}); }}" for cause in IDLE)
    return Template(_file("page.html")).substitute(
        title=title,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        patterns="\n".join(_patterns()),
        header="\n".join(_header(views, title)),
        switches="\n".join(_switches(views)),
        legend="\n".join(_legend(views)),
        bars="\n".join(_bars(views)),
        idle="\n".join(idle_table(views)),
        comparison="\n".join(comparison_tables(*views)) if len(views) == 2 else "",
        waits="\n".join(wait_tables(views)),
        data=page_data(views),
        version=escape(__version__),
    )


def _file(name: str) -> str:
    return files("raypipe.show").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _header(views: Sequence[View], title: str) -> Iterator[str]:
    sources = " above ".join(view.word for view in views)
    counts = list(dict.fromkeys(map(_counts, views)))
    if len(counts) == 2:
        counts = [f"{view.word} {words}" for view, words in zip(views, counts, strict=True)]
    yield f"<h1>{title}</h1>"
    yield f'<p class="soft">{" &middot; ".join([sources, *counts])}</p>'
    yield '<dl class="figures">'
    if len(views) == 2:
        first, second = (view.trace for view in views)
        # Second against first, as in the tables below; of a prediction what it missed by is called its error.
        compared = differences(first, second)[:3] if first.source is not second.source else differences(second, first)[:3]
        word = header(first, second)[-1]
        for name, *values, change in rows(compared):
            shown = values if first.source is not second.source else values[::-1]
            pair = " ".join(f'<span class="soft">{view.word}</span> <b>{value}</b>' for view, value in zip(views, shown, strict=True))
            yield f'<div><dt>{name}</dt><dd>{pair} <span class="error">{word} {change}</span></dd></div>'
    else:
        trace = views[0].trace
        figures = [("update time", seconds(trace.update_s)), ("bubble", ratio(trace.bubble_ratio)), ("makespan", seconds(trace.makespan_s))]
        if any(trace.peak_memory_bytes):
            figures.append(("peak memory", size(max(trace.peak_memory_bytes))))
        for name, value in figures:
            yield f"<div><dt>{name}</dt><dd><b>{value}</b></dd></div>"
    yield "</dl>"
    for view in views:
        for note in view.trace.notes:
            yield f'<p class="finding">{escape(note)}</p>'
        for sentence in findings(view.division):
            lead = f"{view.word}: " if len(views) == 2 else ""
            yield f'<p class="finding">{escape(lead + sentence)}</p>'


def _switches(views: Sequence[View]) -> Iterator[str]:
    traces = [view.trace for view in views]
    switches = (
        ("messages", "Messages", any(map(_has_messages, traces))),
        ("memory", "Memory", any(map(has_memory, traces))),
        ("pairs", "Device by device", len(views) == 2),
    )
    for name, words, is_shown in switches:
        if is_shown:
            yield f'<button type="button" data-shows="{name}" aria-pressed="false">{words}</button>'


def _has_messages(trace: Trace) -> bool:
    return any(span.kind is SpanKind.TRANSFER for span in trace.spans)


# What the patterns draw in a square of 8 pixels: what is on its way is dotted, overhead crossed.
_RISING, _FALLING = "M-2 10L10 -2M-2 2L2 -2M6 10L10 6", "M-2 -2L10 10M6 -2L10 2M-2 6L2 10"
_PATTERNS = {
    Cause.ACTIVATION: ("activation", _RISING),
    Cause.GRADIENT: ("gradient", _FALLING),
    Cause.COLLECTIVE: ("collective", "M0 4H8"),
    Cause.OVERHEAD: ("overhead", _RISING + _FALLING),
    Cause.ACTIVATION_TRANSFER: ("activation dots", "M2 2h.01M6 6h.01"),
    Cause.GRADIENT_TRANSFER: ("gradient dots", "M2 2h.01M6 6h.01"),
    Cause.COLLECTIVE_TRANSFER: ("collective dots", "M2 2h.01M6 6h.01"),
    Cause.WARM_UP: ("ramp", "M0 0"),
    Cause.DRAIN: ("ramp", "M0 0"),
}


def _patterns() -> Iterator[str]:
    for cause in IDLE:
        classes, path = _PATTERNS[cause]
        square = f'<rect width="8" height="8"/><path d="{path}"/>'
        yield f'<pattern id="p-{cause}" class="{classes}" width="8" height="8" patternUnits="userSpaceOnUse">{square}</pattern>'


def _boxes(part: str, place: str) -> str:
    fills = [part] if part in CAUSES else part.split("&")
    share = 100 / len(fills)
    return "".join(f'<rect class="fill-{fill}" {place} y="{at * share:g}%" height="{share:g}%"/>' for at, fill in enumerate(fills))


def _sample(part: str, words: str) -> str:
    letter = "" if part in CAUSES or "&" in part else f'<text x="10" y="11">{part}</text>'
    title = f"<title>{escape(MEANINGS[CAUSES[part]])}</title>" if part in CAUSES else ""
    boxes = _boxes(part, 'width="20"')
    return f'<li><svg width="20" height="14">{title}{boxes}{letter}</svg>{escape(words)}</li>'


def _legend(views: Sequence[View]) -> Iterator[str]:
    yield from (_sample(part, part_words(part)) for part in parts_of(views) if "&" not in part)
    traces = [view.trace for view in views]
    if any(map(_has_messages, traces)):
        yield '<li><svg width="20" height="14"><rect class="message" y="5" width="20" height="5"/></svg>message on its way</li>'
    if any(map(has_memory, traces)):
        yield '<li><svg width="20" height="14"><path class="held" d="M0 14V6H9V2H20V14"/></svg>memory held</li>'
    labels = Labels(*traces)
    notes = (pipeline_words(labels.num_pipelines), "darker: later stages of a device" if labels.with_stage else "")
    yield from (f"<li>{escape(note)}</li>" for note in notes if note)


def _bars(views: Sequence[View]) -> Iterator[str]:
    parts = parts_of(views)
    whole_s = max(view.trace.makespan_s for view in views) or 1.0
    num_rows = sum(len(view.trace.devices) for view in views)
    yield '<ul class="legend"><li class="soft">mean of all devices:</li>'
    for part in parts:
        means = []
        for view in views:
            total_s = math.fsum(part_s(view, device, part) for device in range(len(view.trace.devices)))
            means.append(ratio(total_s / (len(view.trace.devices) * view.trace.makespan_s or 1.0)))
        yield _sample(part, f"{part_words(part)} {' / '.join(means)}")
    yield f'</ul><div class="bars{" dense" if num_rows > 96 else ""}{" pairs" if len(views) == 2 else ""}" aria-hidden="true">'
    for device in range(max(len(view.trace.devices) for view in views)):
        present = [view for view in views if device < len(view.trace.devices)]
        yield f'<div class="name">{escape(present[0].trace.devices[device])}</div><div>'
        for view in present:
            lead = f"{view.word}, " if len(views) == 2 else ""
            yield '<svg class="bar">'
            at_s = 0.0
            for part in parts:
                if lasts_s := part_s(view, device, part):
                    words = f"{lead}{device_words(view.division, device)}: {part_words(part)} {seconds(lasts_s)}, "
                    title = escape(words + ratio(lasts_s / view.trace.makespan_s))
                    place = f'x="{100 * at_s / whole_s:.3f}%" width="{100 * lasts_s / whole_s:.3f}%"'
                    yield f"<g><title>{title}</title>{_boxes(part, place)}</g>"
                    at_s += lasts_s
            yield "</svg>"
        yield "</div>"
    yield "</div>"


def _counts(view: View) -> str:
    numbers = (
        (len(view.trace.devices), "device"),
        (len({stage for stages in view.division.stages for stage in stages}), "stage"),
        (view.num_microbatches, "microbatch"),
        (view.trace.num_updates, "update"),
    )
    return ", ".join(counted(count, noun) for count, noun in numbers)
