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
