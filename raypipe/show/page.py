"""Traces as one HTML page, of `page.html`, `page.css` and three scripts, which draw the timeline from the JSON of `page_data.py`.

Nothing in a trace can act on the page: text is escaped, and a content policy allows one script and one style and no loading.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from string import Template

from raypipe import __version__
from raypipe.artifacts.trace import Trace
from raypipe.show.causes import findings
from raypipe.show.differences import difference_reports
from raypipe.show.page_bars import bars, fills, legend, patterns
from raypipe.show.page_data import page_data
from raypipe.show.page_tables import comparison_tables, idle_table, link_tables, wait_tables
from raypipe.show.run_sections import RunData, configuration_section, run_figures, stages_section, training_section
from raypipe.show.svg_document import escape
from raypipe.show.view import View, has_memory, has_messages, has_sums, views_of
from raypipe.units import counted, ratio, seconds, size

_SCRIPTS = ("page_read.js", "page_draw.js", "page_pointer.js")  # one script, in this order
_NUM_COMPARED = 3  # update time, makespan and bubble; the tables below have the devices


def draw_page(traces: Sequence[Trace], run: RunData | None = None) -> str:
    """Draw one trace, or two with their differences, and the run that they are of if given."""
    views = views_of(traces)
    title = escape(run.name) if run is not None else escape(" and ".join(dict.fromkeys(view.trace.name or "trace" for view in views)))
    style, script = _file("page.css"), "".join(map(_file, _SCRIPTS))
    style += "".join(fills(views))
    return Template(_file("page.html")).substitute(
        title=title,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        patterns="\n".join(patterns()),
        header="\n".join(_header(views, title, run)),
        switches="\n".join(_switches(views)),
        legend="\n".join(legend(views)),
        bars="\n".join(bars(views)),
        idle="\n".join(idle_table(views)),
        comparison="\n".join(comparison_tables(*views)) if len(views) == 2 else "",
        waits="\n".join([*wait_tables(views), *link_tables(views)]),
        run="\n".join([*stages_section(run), *training_section(run)]) if run is not None else "",
        configuration="\n".join(configuration_section(run)) if run is not None else "",
        data=page_data(views),
        version=escape(__version__),
    )


def _file(name: str) -> str:
    return files("raypipe.show").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _header(views: Sequence[View], title: str, run: RunData | None) -> Iterator[str]:
    sources = " above ".join(view.word for view in views)
    counts = list(dict.fromkeys(map(_counts, views)))
    if len(counts) == 2:
        counts = [f"{view.word} {words}" for view, words in zip(views, counts, strict=True)]
    yield f"<h1>{title}</h1>"
    yield f'<p class="soft">{" &middot; ".join([sources, *counts])}</p>'
    figures = _compared_figures(*views) if len(views) == 2 else _figures(views[0].trace)
    yield '<dl class="figures">'
    if run is not None:
        yield from (f"<div><dt>{name}</dt><dd>{shown}</dd></div>" for name, shown in run_figures(run))
    yield from (f"<div><dt>{name}</dt><dd>{shown}</dd></div>" for name, shown in figures)
    yield "</dl>"
    yield from (f'<p class="finding">{escape(note)}</p>' for note in (run.notes if run is not None else ()))
    for view in views:
        lead = f"{view.word}: " if len(views) == 2 else ""
        yield from (f'<p class="finding">{escape(note)}</p>' for note in view.trace.notes)
        yield from (f'<p class="finding">{escape(lead + sentence)}</p>' for sentence in findings(view.division))


def _counts(view: View) -> str:
    numbers = (
        (len(view.trace.devices), "device"),
        (len({stage for stages in view.division.stages for stage in stages}), "stage"),
        (view.num_microbatches, "microbatch"),
        (view.trace.num_updates, "update"),
    )
    return ", ".join(counted(count, noun) for count, noun in numbers)


def _figures(trace: Trace) -> Iterator[tuple[str, str]]:
    figures = [("update time", seconds(trace.update_s)), ("bubble", ratio(trace.bubble_ratio)), ("makespan", seconds(trace.makespan_s))]
    if any(trace.peak_memory_bytes):
        figures.append(("peak memory", size(max(trace.peak_memory_bytes))))
    yield from ((name, f"<b>{text}</b>") for name, text in figures)


def _compared_figures(first: View, second: View) -> Iterator[tuple[str, str]]:
    # A prediction has an error; of two alike the second differs from the first, as in the tables below.
    is_alike = first.trace.source is second.trace.source
    reports = difference_reports(second.trace, first.trace) if is_alike else difference_reports(first.trace, second.trace)
    for report in reports[:_NUM_COMPARED]:
        name, *values, change = report.cells().values()
        pair = zip((first, second), values[::-1] if is_alike else values, strict=True)
        shown = " ".join(f'<span class="soft">{view.word}</span> <b>{value}</b>' for view, value in pair)
        yield name, f'{shown} <span class="error">{"difference" if is_alike else "error"} {change}</span>'


def _switches(views: Sequence[View]) -> Iterator[str]:
    traces = [view.trace for view in views]
    switches = (
        ("messages", "Links", any(has_messages(trace) or has_sums(trace) for trace in traces)),
        ("memory", "Memory", any(map(has_memory, traces))),
        ("pairs", "Device by device", len(views) == 2),
    )
    for name, words, is_shown in switches:
        if is_shown:
            yield f'<button type="button" data-shows="{name}" aria-pressed="false">{words}</button>'
