"""Fits the overheads of Ops and messages to measured traces.

A device's time between the ends of two computations is explained by the items that lie between:

    ... | F of 5 ms |gap| recv |gap| B of 10 ms | ...
          ^ nominal              the same for every F, B, I, W, message handed over and message taken
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raypipe.artifacts.calibration import TransportCosts
from raypipe.artifacts.topology import NodeLink, Overheads
from raypipe.artifacts.trace import Trace, steps_of
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Compute, DeviceProgram, Recv
from raypipe.simulation.cost import Cost

_OUTER = 0.05
"""Share that means leave out at each end: rare delays add up on the critical path, but a single pause of the machine does not count."""


@dataclass
class Observations:
    """Seconds observed in traces.

    Attributes:
        beyond: Seconds of Ops beyond their nominal time.
        gaps: Seconds between two spans with nothing between them.
        sent: Seconds between two spans with one Send between them, by bytes.
        received: Messages that had arrived: seconds since their sender's Op ended and seconds of the Recv, by bytes.
        carried: Messages that were waited for: seconds from the end of the sender's Op to that of the Recv, by bytes.
    """

    beyond: defaultdict[OpKind, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: list[float] = field(default_factory=list)
    sent: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    received: defaultdict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    carried: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, programs: Sequence[DeviceProgram], trace: Trace, cost: Cost) -> None:
        """Add a measured window whose spans are on one clock; `cost` has the nominal times, without overheads."""
        walks = {program.device: steps_of(program, trace.by_device[program.device]) for program in programs}
        made_s = {send.message: step.span.end_s for walk in walks.values() for step in walk for send in step.sent}
        sizes = {step.item.message: step.span.bytes for walk in walks.values() for step in walk if isinstance(step.item, Recv)}
        for device, walk in walks.items():
            for before, after in itertools.pairwise(walk):
                gap_s = after.span.start_s - before.span.end_s
                if not before.started and len(before.sent) == 1:
                    self.sent[sizes[before.sent[0].message]].append(gap_s)
                elif not before.started and not before.sent:
                    self.gaps.append(gap_s)
            for item, span in ((step.item, step.span) for step in walk):
                if isinstance(item, Compute):
                    nominal_s = cost.compute_s(device, item.ops, tuple(rows[1] - rows[0] for rows in item.rows))
                    if len(item.ops) == 1 and nominal_s:
                        self.beyond[item.ops[0].kind].append(span.end_s - span.start_s - nominal_s)
                elif isinstance(item, Recv):
                    left_s = made_s[item.message]
                    if left_s > span.start_s:
                        self.carried[span.bytes].append(span.end_s - left_s)
                    else:
                        self.received[span.bytes].append((span.start_s - left_s, span.end_s - span.start_s))

    def costs(self) -> TransportCosts:
        """Return the costs that explain the observations."""
        gap_s = _middle_mean(self.gaps)
        send_s, send_s_per_byte = _line({size: _middle_mean(seconds) - gap_s for size, seconds in self.sent.items()})
        # A message that is twice as old as the transfer takes had arrived.
        settled_s = 2 * max(map(_middle_mean, self.carried.values()), default=0.0)
        settled = {size: [took_s for age_s, took_s in pairs if age_s > settled_s] for size, pairs in self.received.items()}
        take_s, take_s_per_byte = _line({size: _middle_mean(seconds) for size, seconds in settled.items() if seconds})
        beyond = {kind: max(_middle_mean(seconds) + gap_s, 0.0) for kind, seconds in self.beyond.items()}
        overheads = Overheads(
            forward_s=beyond.get(OpKind.FORWARD, 0.0),
            backward_s=beyond.get(OpKind.BACKWARD, 0.0),
            input_grad_s=beyond.get(OpKind.INPUT_GRADIENT, 0.0),
            weight_grad_s=beyond.get(OpKind.WEIGHT_GRADIENT, 0.0),
            send_s=send_s,
            send_s_per_byte=send_s_per_byte,
            recv_s=take_s + gap_s,
            recv_s_per_byte=take_s_per_byte,
        )
        took_s = {size: _middle_mean(seconds) - take_s - take_s_per_byte * size for size, seconds in self.carried.items()}
        latency_s, s_per_byte = _line(took_s)
        return TransportCosts(
            overheads=overheads, link=NodeLink(latency_s=latency_s, bandwidth_bytes_per_s=1 / s_per_byte if s_per_byte else None)
        )


def _middle_mean(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds)
    cut = int(len(ordered) * _OUTER)
    return statistics.fmean(ordered[cut : len(ordered) - cut]) if ordered else 0.0


def _line(took_s: Mapping[int, float]) -> tuple[float, float]:
    # a and b of t = a + b * bytes through the smallest and the largest message, both clamped at 0.
    sizes = sorted(took_s)
    if not sizes:
        return 0.0, 0.0
    small, large = sizes[0], sizes[-1]
    slope = max((took_s[large] - took_s[small]) / (large - small), 0.0) if large > small else 0.0
    return max(took_s[small] - small * slope, 0.0), slope
