"""Current costs of layers, devices and links, and their changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.communication.patterns import Pattern
from raypipe.planning.problem import Problem
from raypipe.units import seconds

_SIGNIFICANT = 1.15  # Factor by which a figure must change to matter.
_NO_LIMIT_BYTES_PER_S = 1e30  # Stands for a link without limit, so that changes to and from it are finite.
_SHORT = 0.1  # Share of a device's time with a microbatch that is added to latencies: only long ones change by a large factor.
_GONE = 1e-9  # Factor by which a link changes that ends to exist.
_UNSTATED = math.log(1e12)  # No bandwidth changes by such a factor, unless to or from no limit.


@dataclass(frozen=True)
class ClusterState:
    """Measured profile and topology; device names and order never change.

    Attributes:
        patterns: Patterns of sums of the choice that runs, by the members' numbers in its layout. Where left out, and for other choices,
            sums have the patterns with which a run begins.
    """

    profile: ModelProfile
    topology: ClusterTopology
    patterns: Mapping[tuple[int, ...], Pattern] = field(default_factory=dict)


class Change(NamedTuple):
    """Ratio of a new figure to the old one, and its description."""

    factor: float
    text: str


def is_significant(factor: float) -> bool:
    """Return whether a figure has changed so much that plans may change."""
    return not 1 / _SIGNIFICANT <= factor <= _SIGNIFICANT


def changes(old: Problem, new: Problem) -> Iterator[Change]:
    """Yield the changes of each link, and the change of each device, all layers together, and each layer."""
    short_s = _SHORT * float(new.prefix_s[0, :, -1].sum()) / new.num_devices
    for sources, targets in new.blocks:
        if sources != targets:
            ends = " -> ".join(new.topology.node_of(new.names[group[0]]).name for group in (sources, targets))
            there = [math.isfinite(float(problem.latency_s[sources[0], targets[-1]])) for problem in (old, new)]
            if not all(there):
                if any(there):
                    yield Change(_GONE if there[0] else 1 / _GONE, f"link {ends} {'is gone' if there[0] else 'is there'}")
                continue
            before, now = (float(problem.latency_s[sources[0], targets[-1]]) + short_s for problem in (old, new))
            what = "longer" if now > before else "shorter"
            yield Change(before / now, f"link {ends} is {what}: its latency is {seconds(max(now - short_s, 0.0))}")
            before, now = (float(problem.bandwidth[sources[0], targets[-1]]) for problem in (old, new))
            rate = f"{now * 8 / 1e6:.4g} Mbit/s" if math.isfinite(now) else "no limit"
            factor = min(now, _NO_LIMIT_BYTES_PER_S) / min(before, _NO_LIMIT_BYTES_PER_S)
            yield Change(factor, f"link {ends} {'fell' if now < before else 'rose'} to {rate}")
    for name in new.names:
        factor = new.topology.device(name).speed / old.topology.device(name).speed
        yield Change(factor, f"device {name} computes {factor:.2f}x as fast as before")
    before_s, now_s = (float(problem.prefix_s[:, :, -1].sum()) for problem in (old, new))
    yield Change(before_s / now_s, f"layers take {now_s / before_s:.2f}x as long as profiled")
    layers_s = [problem.layer_s.sum(axis=(0, 1)) for problem in (old, new)]
    for layer, before, after in zip(new.profile.layers, *(each.tolist() for each in layers_s), strict=True):
        if before and after and after != before:
            yield Change(before / after, f"layer {layer.name} takes {after / before:.2f}x as long as before")


def have_changed(old: Problem, new: Problem) -> bool:
    """Return whether any figure has changed significantly."""
    return any(is_significant(change.factor) for change in changes(old, new))


def largest_change(old: Problem, new: Problem) -> str:
    """Describe the figure that has changed most."""
    ordered = sorted(changes(old, new), key=lambda change: abs(math.log(change.factor)))
    # A link that gets its first measured bandwidth explains least.
    measured = [change for change in ordered if abs(math.log(change.factor)) <= _UNSTATED]
    largest = measured[-1] if measured and is_significant(measured[-1].factor) else ordered[-1]
    return largest.text if is_significant(largest.factor) else "as measured"
