"""Where the time of each device goes, as bars, and the fills that bars and timeline have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from raypipe.analysis.idle import IDLE, Cause
from raypipe.schedules.ir import OpKind
from raypipe.show.branches import branch_words, branches_of
from raypipe.show.causes import MEANINGS
from raypipe.show.labels import Labels, colour, pipeline_words
from raypipe.show.svg_document import escape
from raypipe.show.view import Part, View, has_memory, has_messages, has_sums, parts_of
from raypipe.units import ratio, seconds

_MOST_TALL_ROWS = 96

# What the patterns draw in a square of 8 pixels: what is on its way is dotted, overhead crossed.
_RISING, _FALLING = "M-2 10L10 -2M-2 2L2 -2M6 10L10 6", "M-2 -2L10 10M6 -2L10 2M-2 6L2 10"
_DOTS = "M2 2h.01M6 6h.01"
_PATTERNS = {
    Cause.ACTIVATION: ("activation", _RISING),
    Cause.GRADIENT: ("gradient", _FALLING),
    Cause.OTHER_BRANCH: ("branch", "M4 0V8"),
    Cause.COLLECTIVE: ("collective", "M0 4H8"),
    Cause.DATA: ("data", "M0 4H8M4 0V8"),
    Cause.OVERHEAD: ("overhead", _RISING + _FALLING),
    Cause.ACTIVATION_TRANSFER: ("activation dots", _DOTS),
    Cause.GRADIENT_TRANSFER: ("gradient dots", _DOTS),
    Cause.COLLECTIVE_TRANSFER: ("collective dots", _DOTS),
    Cause.WARM_UP: ("ramp", "M0 0"),
    Cause.DRAIN: ("ramp", "M0 0"),
}


def fills(views: Sequence[View]) -> Iterator[str]:
    """Yield the style of each kind of Op, each cause and each branch."""
    yield from (f"\n.fill-{kind} {{ fill: {colour(kind)}; }}" for kind in OpKind)
    yield from (f"\n.fill-{cause} {{ fill: url(#p-{cause}); }}" for cause in IDLE)
    branches = branches_of([view.trace for view in views]).values()
    yield from (f"\n.fill-branch-{branch.number} {{ fill: {branch.colour}; }}" for branch in branches)


def patterns() -> Iterator[str]:
    """Yield what the styles of causes refer to."""
    for cause in IDLE:
        classes, path = _PATTERNS[cause]
        square = f'<rect width="8" height="8"/><path d="{path}"/>'
        yield f'<pattern id="p-{cause}" class="{classes}" width="8" height="8" patternUnits="userSpaceOnUse">{square}</pattern>'


def legend(views: Sequence[View]) -> Iterator[str]:
    """Yield what the timeline shows."""
    yield from (_sample(part, part.words) for part in parts_of(views) if len(part.fills) == 1)
    traces = [view.trace for view in views]
    if any(map(has_messages, traces)):
        yield '<li><svg width="20" height="14"><rect class="message" y="5" width="20" height="5"/></svg>message on its way</li>'
    if any(map(has_sums, traces)):
        yield '<li><svg width="20" height="14"><rect class="sum" y="5" width="20" height="5"/></svg>sum or norm on its way</li>'
    if any(map(has_memory, traces)):
        yield '<li><svg width="20" height="14"><path class="held" d="M0 14V6H9V2H20V14"/></svg>memory held</li>'
    labels = Labels(*traces)
    for branch in labels.branches.values():
        letter = f'<text class="letter" x="10" y="11">{branch.letter}</text>'
        box = f'<rect class="fill-branch-{branch.number}" width="20" height="14"/>'
        yield f'<li><svg width="20" height="14">{box}{letter}</svg>{escape(branch_words(branch, traces))}</li>'
    notes = (pipeline_words(labels.num_pipelines), "darker: later stages of a device" if labels.with_stage else "")
    yield from (f"<li>{escape(note)}</li>" for note in notes if note)


def bars(views: Sequence[View]) -> Iterator[str]:
    """Yield the mean of all devices as a legend, and a bar for each device and trace."""
    parts = parts_of(views)
    whole_s = max(view.trace.makespan_s for view in views) or 1.0
    num_rows = sum(len(view.trace.devices) for view in views)
    yield '<ul class="legend"><li class="soft">mean of all devices:</li>'
    for part in parts:
        yield _sample(part, f"{part.words} {' / '.join(ratio(_mean_share(part, view)) for view in views)}")
    classes = ["bars", *(["dense"] if num_rows > _MOST_TALL_ROWS else []), *(["pairs"] if len(views) == 2 else [])]
    yield f'</ul><div class="{" ".join(classes)}" aria-hidden="true">'
    for device in range(max(len(view.trace.devices) for view in views)):
        present = [view for view in views if device < len(view.trace.devices)]
        yield f'<div class="name">{escape(present[0].labels[device])}</div><div>'
        for view in present:
            lead = f"{view.word}, " if len(views) == 2 else ""
            yield f'<svg class="bar">\n{"".join(_bar(view, device, parts, lead, whole_s))}</svg>'
        yield "</div>"
    yield "</div>"


def _mean_share(part: Part, view: View) -> float:
    num_devices = len(view.trace.devices)
    return math.fsum(part.seconds(view, device) for device in range(num_devices)) / (num_devices * view.trace.makespan_s or 1.0)


def _bar(view: View, device: int, parts: Sequence[Part], lead: str, whole_s: float) -> Iterator[str]:
    at_s = 0.0
    for part in parts:
        if lasts_s := part.seconds(view, device):
            share = ratio(lasts_s / view.trace.makespan_s)
            title = f"{lead}{view.device_words[device]}: {part.words} {seconds(lasts_s)}, {share}"
            place = f'x="{100 * at_s / whole_s:.3f}%" width="{100 * lasts_s / whole_s:.3f}%"'
            yield f"<g><title>{escape(title)}</title>{_boxes(part, place)}</g>\n"
            at_s += lasts_s


def _sample(part: Part, words: str) -> str:
    letter = f'<text x="10" y="11">{part.key}</text>' if part.cause is None and len(part.fills) == 1 else ""
    title = f"<title>{escape(MEANINGS[part.cause])}</title>" if part.cause else ""
    boxes = _boxes(part, 'width="20"')
    return f'<li><svg width="20" height="14">{title}{boxes}{letter}</svg>{escape(words)}</li>'


def _boxes(part: Part, place: str) -> str:
    share = 100 / len(part.fills)
    return "".join(f'<rect class="fill-{fill}" {place} y="{at * share:g}%" height="{share:g}%"/>' for at, fill in enumerate(part.fills))
