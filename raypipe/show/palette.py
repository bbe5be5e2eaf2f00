"""The colour of each kind of Op, the same in the terminal and in SVG: forwards blue, backwards warm, weight gradients green.

Black text is readable on all of them, and neighbours differ in lightness too, for those who do not see all colours.
"""

from __future__ import annotations

from collections.abc import Mapping

from raypipe.schedules.ir import OpKind

COLOURS: Mapping[OpKind, str] = {
    OpKind.FORWARD: "#7fb2e5",
    OpKind.BACKWARD: "#f2a45c",
    OpKind.INPUT_GRADIENT: "#f7c873",
    OpKind.WEIGHT_GRADIENT: "#8cc98a",
    OpKind.RECOMPUTE: "#c3aee0",
    OpKind.UPDATE: "#b08a78",
    OpKind.REDUCE: "#e59ab8",
    OpKind.PUBLISH: "#d6d06a",
    OpKind.EXCHANGE: "#6cc4bd",
}

NAMES: Mapping[OpKind, str] = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD: "backward",
    OpKind.INPUT_GRADIENT: "input gradient",
    OpKind.WEIGHT_GRADIENT: "weight gradient",
    OpKind.RECOMPUTE: "recompute",
    OpKind.UPDATE: "update",
    OpKind.REDUCE: "gradient reduction",
    OpKind.PUBLISH: "publication",
    OpKind.EXCHANGE: "exchange",
}

_LIGHTER = 0.5


def colour(kind: OpKind, pipeline: int = 0) -> str:
    """Return the colour of a kind; pipelines of odd numbers are lighter."""
    if pipeline % 2 == 0:
        return COLOURS[kind]
    channels = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * _LIGHTER):02x}" for channel in channels)


def pipeline_words(num_pipelines: int) -> str:
    """Return what a legend says of lighter colours; empty for one pipeline."""
    odd = [str(pipeline) for pipeline in range(1, num_pipelines, 2)]
    return f"lighter: {'pipeline' if len(odd) == 1 else 'pipelines'} {', '.join(odd)}" if odd else ""
