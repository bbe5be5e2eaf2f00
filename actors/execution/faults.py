"""Injected faults, for tests and drills: what a device does wrong, and before which Op."""

from __future__ import annotations

import os
import signal
import time
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


class ScriptedFault(RuntimeError):  # noqa: N818  # not an error of raypipe
    """Raised by a fault of kind `raise`."""


@dataclass(frozen=True)
class Fault:
    """One fault on a device, before the Op with text `op`, in window `window` of its program.

    Without `repeats` it strikes once; otherwise also after each recovery of the run.
    """

    device: int
    op: str
    kind: FaultKind
    window: int = 0
    hang_s: float = 3600.0
    repeats: bool = False


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

    def after(self, window: int) -> FaultScript:
        """Return what is left once a window has failed."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.repeats or fault.window > window))

    def strike(self, *, device: int, op: str, window: int) -> None:
        """Inject the faults before this Op; one of kind `raise` raises `ScriptedFault`."""
        for fault in self.faults:
            if (fault.device, fault.op, fault.window) == (device, op, window):
                if fault.kind is FaultKind.KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.kind is FaultKind.HANG:
                    time.sleep(fault.hang_s)
                else:
                    raise ScriptedFault(f"scripted fault before {op}")
