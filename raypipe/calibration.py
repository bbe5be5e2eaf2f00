"""What a machine's runs cost besides computation: `raypipe.calibration/1`, and how it is fitted to a measured trace.

A device's time between the ends of two computations is explained by the items that lie between:

    ... | F of 5 ms |gap| recv |gap| B of 10 ms | ...
          ^ nominal              the same for every F, B, I, W, message handed over and message taken

The nominal times are those of a profile, which measures each layer alone; so what a stage costs besides its layers counts
as overhead too. Fitted are means of the middle nine tenths: on the critical path rare long delays add up as well as short
ones, but a single pause of the machine is no property of it.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from raypipe import codec
from raypipe.cost import Cost
from raypipe.errors import suggestion
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Await, Collective, Compute, DeviceProgram, Message, Recv, Send, Start
from raypipe.topology import NodeLink, Overheads
from raypipe.trace import Span, Trace

FORMAT = "raypipe.calibration/1"

_OUTER = 0.05


@dataclass(frozen=True, kw_only=True)
class TransportCosts:
    """What passing messages between the devices of one node costs over one transport.

    Attributes:
        overheads: of each device.
        link: between two devices.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = codec.config()

    overheads: Overheads
    link: NodeLink


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The costs of one machine.

    Attributes:
        host: its name.
        date: of the measurement.
        versions: of what was measured: python, torch, ray, raypipe.
        transports: the costs by transport, such as `shm`.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = codec.config()

    host: str
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    transports: dict[str, TransportCosts]

    def of(self, transport: str) -> TransportCosts:
        """The costs over one transport.

        Raises:
            FormatError: it was not measured.
        """
        try:
            return self.transports[transport]
        except KeyError:
            known = suggestion(transport, self.transports)
            raise codec.invalid(self, "transports", f"has no {transport!r}{known}; run `raypipe calibrate` again") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """The calibration that a JSON file holds.

        Raises:
            FormatError: says what is wrong with the file, and where.
        """
        return codec.from_json(cls, codec.read_text(path), path=os.fspath(path), format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file."""
        codec.write_text(path, codec.to_json(self, format_name=FORMAT))


@dataclass(frozen=True)
class _Step:
    """An item that took time, with its span and what was sent and joined right behind it."""

    item: Compute | Recv | Await
    span: Span
    sent: list[Message] = field(default_factory=list)
    started: list[Collective] = field(default_factory=list)


@dataclass
class Observations:
    """Seconds seen in traces, by what they tell of.

    Attributes:
        beyond: of an Op of a kind, beyond its nominal time.
        gaps: from the end of a span to the begin of the next, by the number of Sends between.
        taken: pairs (age, seconds): of taking a message whose maker had ended so long before.
        carried: by bytes, of messages that were waited for: from the end of the Op that made one until it was taken.
    """

    beyond: defaultdict[OpKind, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    taken: list[tuple[float, float]] = field(default_factory=list)
    carried: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, programs: Sequence[DeviceProgram], trace: Trace, cost: Cost) -> None:
        """Notes what a measured window tells.

        Args:
            programs: that ran.
            trace: of all their devices, by one clock.
            cost: the nominal times, without overheads.
        """
        walks = {program.device: list(_walk(program, trace.by_device[program.device])) for program in programs}
        made_s = {message: step.span.end_s for walk in walks.values() for step in walk for message in step.sent}
        for device, walk in walks.items():
            for before, after in itertools.pairwise(walk):
                if not before.started:
                    self.gaps[len(before.sent)].append(after.span.start_s - before.span.end_s)
            for step in walk:
                self._note(device, step, made_s, cost)

    def _note(self, device: int, step: _Step, made_s: Mapping[Message, float], cost: Cost) -> None:
        item, span = step.item, step.span
        if isinstance(item, Compute):
            nominal_s = cost.compute_s(device, item.ops, tuple(rows[1] - rows[0] for rows in item.rows))
            if len(item.ops) == 1 and nominal_s:
                self.beyond[item.ops[0].kind].append(span.end_s - span.start_s - nominal_s)
        elif isinstance(item, Recv):
            left_s = made_s[item.message]
            if left_s > span.start_s:
                self.carried[span.bytes].append(span.end_s - left_s)
            else:
                self.taken.append((span.start_s - left_s, span.end_s - span.start_s))

    def costs(self) -> TransportCosts:
        """What explains them."""
        gap_s = _middle_mean(self.gaps[0])
        # A message that was made twice as long ago as one travels was there.
        settled_s = 2 * max(map(_middle_mean, self.carried.values()), default=0.0)
        take_s = _middle_mean([took_s for age_s, took_s in self.taken if age_s > settled_s])
        beyond = {kind: max(_middle_mean(seconds) + gap_s, 0.0) for kind, seconds in self.beyond.items()}
        overheads = Overheads(
            forward_s=beyond.get(OpKind.FORWARD, 0.0),
            backward_s=beyond.get(OpKind.BACKWARD, 0.0),
            input_grad_s=beyond.get(OpKind.INPUT_GRADIENT, 0.0),
            weight_grad_s=beyond.get(OpKind.WEIGHT_GRADIENT, 0.0),
            send_s=max(_middle_mean(self.gaps[1]) - gap_s, 0.0),
            recv_s=take_s + gap_s,
        )
        return TransportCosts(
            overheads=overheads, link=_link({size: _middle_mean(took_s) - take_s for size, took_s in self.carried.items()})
        )


def _walk(program: DeviceProgram, spans: Sequence[Span]) -> Iterator[_Step]:
    """The items that took time with their spans: both stand in the order in which they ran."""
    spans_left = iter(spans)
    step: _Step | None = None
    for item in program.items:
        if isinstance(item, Send):
            assert step is not None, "a message is made by an Op"
            step.sent.append(item.message)
        elif isinstance(item, Start):
            assert step is not None, "a collective joins what an Op has made"
            step.started.append(item.collective)
        else:
            if step is not None:
                yield step
            step = _Step(item, next(spans_left))
    if step is not None:
        yield step


def _middle_mean(seconds: Sequence[float]) -> float:
    """The mean of the middle nine tenths; 0 where nothing was seen."""
    ordered = sorted(seconds)
    cut = int(len(ordered) * _OUTER)
    return statistics.fmean(ordered[cut : len(ordered) - cut]) if ordered else 0.0


def _link(took_s: Mapping[int, float]) -> NodeLink:
    """Latency and bandwidth through the smallest and the largest message."""
    sizes = sorted(took_s)
    if not sizes:
        return NodeLink(latency_s=0.0)
    small, large = sizes[0], sizes[-1]
    slope = (took_s[large] - took_s[small]) / (large - small) if large > small else 0.0
    if slope <= 0:
        return NodeLink(latency_s=max(took_s[small], 0.0))
    return NodeLink(latency_s=max(took_s[small] - small * slope, 0.0), bandwidth_bytes_per_s=1 / slope)
