"""Traces for tests: one worked out by hand, and any by chance."""

from __future__ import annotations

from hypothesis import strategies as st

from raypipe.artifacts.trace import Source, Span, SpanItem, SpanKind, Trace
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Op, OpKind, ops_of
from raypipe.schedules.lower import Direction, Message
from raypipe.schedules.text import parse_slot

ACTIVATION = Message(Direction.ACTIVATION, 0, 1, 0)
GRADIENT = Message(Direction.GRADIENT, 1, 0, 0)
NORM = Collective(CollectiveKind.NORM, 0, 0, 0, ())
NUMBERS = st.floats(0, 1e9, allow_nan=False)
SMALL = st.integers(0, 99)
WORDS = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=9)  # no file holds characters that a terminal would obey


def computed(device: int, slot: str, start_s: float, end_s: float) -> Span:
    """A span of the Op or Ops that a text such as `0F1` or `(0F1;1B0)` writes."""
    return Span(device, SpanKind.COMPUTE, ops_of(parse_slot(slot)), start_s, end_s)


# Two devices, two updates of one microbatch:
#   device 0   0F0 .... 0B0 0U0 0F1 .... 0B1 0U1        F from 0 to 1, B from 3 to 5, U to 5.5; again 6 s later
#   device 1   .... 1F0 1B0 1U0                         F from 1 to 1.5, B from 1.5 to 3
TWO_UPDATES = Trace(
    name="by hand",
    source=Source.MEASURED,
    devices=("left", "right"),
    num_updates=2,
    spans=(
        computed(0, "0F0", 0.0, 1.0),
        Span(1, SpanKind.TRANSFER, ACTIVATION, 1.0, 1.25, 100),
        Span(1, SpanKind.RECV, ACTIVATION, 0.0, 1.0, 100),
        computed(1, "(1F0;1B0)", 1.0, 3.0),
        Span(0, SpanKind.RECV, GRADIENT, 1.0, 3.0, 100),
        computed(0, "0B0", 3.0, 5.0),
        Span(0, SpanKind.COLLECTIVE, NORM, 5.0, 5.25, 8),
        computed(0, "0U0", 5.25, 5.5),
        computed(1, "1U0", 5.0, 5.0),
        computed(0, "0U1", 11.0, 11.5),
        computed(1, "1U1", 5.0, 11.0),
    ),
    memory=(((0.0, 10), (1.0, 30), (5.0, 10)), ((0.0, 5),)),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A trace that a file can hold as it is: of messages and collectives only what text tells."""
    devices = draw(st.lists(WORDS, min_size=1, max_size=3))
    spans = []
    for _ in range(draw(st.integers(0, 6))):
        start_s, end_s = sorted((draw(NUMBERS), draw(NUMBERS)))
        kind = draw(st.sampled_from(SpanKind))
        item: SpanItem = (Op(draw(st.sampled_from(OpKind)), 1, draw(SMALL)),) if kind is SpanKind.COMPUTE else draw(waited_for())
        device = draw(st.integers(0, len(devices) - 1))
        sender = draw(st.sampled_from([None, *(other for other in range(len(devices)) if other != device)]))
        spans.append(Span(device, kind, item, start_s, end_s, draw(st.integers(0, 2**62)), sender))
    steps = st.lists(st.tuples(NUMBERS, st.integers(0, 2**62)), max_size=3).map(tuple)
    memory = tuple(draw(steps) for _ in devices) if draw(st.booleans()) else ()
    branches = tuple(draw(st.lists(WORDS, max_size=3)))
    source, num_updates = draw(st.sampled_from(Source)), draw(st.integers(1, 9))
    return Trace(draw(WORDS), source, tuple(devices), num_updates, tuple(spans), memory, branches=branches)


def waited_for() -> st.SearchStrategy[SpanItem]:
    """A message, a collective, or a text of neither."""
    return st.one_of(
        st.builds(Message, st.sampled_from(Direction), SMALL, SMALL, SMALL, pipeline=st.just(0), part=SMALL, rows=st.just((0.0, 1.0))),
        st.builds(Collective, st.sampled_from([CollectiveKind.GRADIENTS, CollectiveKind.TIED]), SMALL, SMALL, st.just(0), st.just(())),
        WORDS,
    )
