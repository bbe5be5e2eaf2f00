"""Injected faults, for tests and drills: what a device does wrong, and before which Op."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum


class FaultKind(StrEnum):
    """What goes wrong."""

    RAISE = "raise"
    """The Op raises an exception."""
    KILL = "kill"
    """The process dies at once, as if the machine had."""
    HANG = "hang"
    """The Op does not end."""
    STOP = "stop"
    """The process does nothing any more, but is there."""


class ScriptedFault(RuntimeError):  # noqa: N818  # not an error of raypipe
    """Raised by a fault of kind `raise`."""


@dataclass(frozen=True)
class Fault:
    """One fault on a device before the Op with text `op`, or on a stage's first copy before any Op, in window `window` of its program.

    Without `repeats` it strikes once; otherwise also after each recovery of the run.
    """

    device: int | None
    op: str | None
    kind: FaultKind
    window: int = 0
    hang_s: float = 3600.0
    repeats: bool = False
    stage: int | None = None


@dataclass(frozen=True)
class FaultScript:
    """The faults of a run, such as `FaultScript().fail_at(device=2, op="2B1")`."""

    faults: tuple[Fault, ...] = ()

    def fail_at(
        self,
        *,
        device: int,
        op: str,
        kind: FaultKind = FaultKind.RAISE,
        window: int = 0,
        hang_s: float = 3600.0,
        repeats: bool = False,
    ) -> FaultScript:
        """Return the script with one more fault."""
        return replace(self, faults=(*self.faults, Fault(device, op, kind, window, hang_s, repeats)))

    def fail_stage(self, stage: int, *, kind: FaultKind, window: int = 0) -> FaultScript:
        """Return the script with one more fault, on whatever device has the first copy of a stage."""
        return replace(self, faults=(*self.faults, Fault(None, None, kind, window, stage=stage)))

    def after(self, window: int) -> FaultScript:
        """Return what is left once a window has failed."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.repeats or fault.window > window))

    def strike(self, *, device: int, op: str, window: int, first_copies: Collection[int] = ()) -> None:
        """Inject the faults before this Op, which belongs to the `first_copies` of stages; one of kind `raise` raises `ScriptedFault`."""
        for fault in self.faults:
            is_here = (fault.device, fault.op) == (device, op) or fault.stage in first_copies
            if is_here and fault.window == window:
                if fault.kind is FaultKind.KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.kind is FaultKind.STOP:
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault.kind is FaultKind.HANG:
                    time.sleep(fault.hang_s)
                else:
                    raise ScriptedFault(f"scripted fault before {op}")
