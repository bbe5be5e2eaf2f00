"""Watches a run from another process: what its devices do now, and who waits for whom."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from raypipe.actors.orders import Status
from raypipe.cluster.stage_actors import CONTROL
from raypipe.errors import InputError, UnknownNameError

_NAME = re.compile(r"(?P<run>.+?): (?:stage [0-9,]+ on )?device (?P<device>.+?)(?: \(start [0-9]+\))?", re.DOTALL)
_BEGAN = re.compile(r"-[0-9a-f]{11,}$")
_ANSWER_S = 2.0


@dataclass(frozen=True)
class WatchedDevice:
    """A device of a run; `status` is `None` where it does not answer."""

    name: str
    status: Status | None


class RunWatch:
    """The stage actors of a run on the connected cluster, found by their names.

    Args:
        run: Name of the run's folder, or of the run on the cluster, which has when it began behind the folder's; left out for the only run
            there is.

    Raises:
        UnknownNameError: No such run is on the cluster.
        InputError: No run is on the cluster, or several are and `run` names none.
    """

    def __init__(self, run: str | None) -> None:
        found = _named_actors()
        runs = sorted({match["run"] for match, _ in found})
        if run is None:
            if len(runs) != 1:
                there = f"these runs are on the cluster: {', '.join(runs)}; name one" if runs else "no run is on the cluster"
                raise InputError(there)
            (run,) = runs
        elif run not in runs:
            of_folder = [one for one in runs if _BEGAN.sub("", one) == run]
            if len(of_folder) != 1:
                raise UnknownNameError("run on the cluster", run, of_folder or runs)
            (run,) = of_folder
        self.run = run

    def look(self) -> list[WatchedDevice]:
        """Return the devices in the order of their numbers; none once the run has ended."""
        named = [(match["device"], where) for match, where in _named_actors() if match["run"] == self.run]
        asked: list[tuple[str, Any]] = []
        for device, where in named:
            try:
                handle = ray.get_actor(where["name"], namespace=where["namespace"])
                asked.append((device, handle.status.options(concurrency_group=CONTROL).remote()))
            except (ValueError, RayError):  # it has just ended
                continue
        if asked:
            ray.wait([ref for _, ref in asked], num_returns=len(asked), timeout=_ANSWER_S)
        seen = [WatchedDevice(device, _answer(ref)) for device, ref in asked]
        return sorted(seen, key=lambda one: (one.status is None, one.status.device if one.status else 0, one.name))


def _named_actors() -> list[tuple[re.Match[str], dict[str, str]]]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [(match, where) for where in named if (match := _NAME.fullmatch(where["name"])) is not None]


def _answer(ref: Any) -> Status | None:
    try:
        answer: Status = ray.get(ref, timeout=0)
    except (GetTimeoutError, RayError):
        return None
    return answer


def awaited_by(devices: Sequence[WatchedDevice]) -> dict[str, list[str]]:
    """Return for each device that others wait for, directly or through others, the names of those that wait in the end for it.

    A device that computes, or does not answer, is the end of a chain; so is the first that comes again in a circle.
    """
    names = {one.status.device: one.name for one in devices if one.status is not None}
    waits = {
        one.name: [names.get(device, f"device {device}") for device in one.status.awaited.devices]
        for one in devices
        if one.status is not None and one.status.awaited is not None and not one.status.computes
    }
    ends: dict[str, list[str]] = {}
    for first in waits:
        seen, at = {first}, {first}
        while at:
            following = {name for one in at for name in waits.get(one, ())} - seen
            for name in sorted(following - waits.keys()):
                ends.setdefault(name, []).append(first)
            seen |= following
            at = following & waits.keys()
    return ends
