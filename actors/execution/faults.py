"""Injected faults, for tests and drills: what a device does wrong, and before what."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
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
    CUT = "cut"
    """The device's connections with others close."""


SAVE = "save"
"""What a device is about to do that writes its layers into a checkpoint."""
CONNECT = "connect"
"""What a device is about to do that meets the others."""


class ScriptedFault(RuntimeError):  # noqa: N818  # not an error of raypipe
    """Raised by a fault of kind `raise`."""


@dataclass(frozen=True)
class Fault:
    """One fault on a device, or on a stage's first copy before any Op, in a window of its program.

    Attributes:
        before: Text of what the device is about to do: an Op such as `2B1`, a message such as `activation 0->1 of microbatch 2`, which
            the device sends or waits for, a sum such as `gradients of stage 1 for update 0`, `SAVE` or `CONNECT`.
        window: Number of the window; of a `SAVE` that of the window before it, of a `CONNECT` that of the one behind it.
        repeats: Whether it strikes again after each recovery of the run.
    """

    device: int | None
    before: str | None
    kind: FaultKind
    window: int = 0
    hang_s: float = 3600.0
    repeats: bool = False
    stage: int | None = None


@dataclass(frozen=True)
class FaultScript:
    """The faults of a run, such as `FaultScript().fail_at(device=2, before="2B1")`."""

    faults: tuple[Fault, ...] = ()

    def fail_at(
        self,
        *,
        device: int,
        before: str,
        kind: FaultKind = FaultKind.RAISE,
        window: int = 0,
        hang_s: float = 3600.0,
        repeats: bool = False,
    ) -> FaultScript:
        """Return the script with one more fault."""
        return replace(self, faults=(*self.faults, Fault(device, before, kind, window, hang_s, repeats)))

    def fail_stage(self, stage: int, *, kind: FaultKind, window: int = 0) -> FaultScript:
        """Return the script with one more fault, on whatever device has the first copy of a stage."""
        return replace(self, faults=(*self.faults, Fault(None, None, kind, window, stage=stage)))

    def after(self, window: int) -> FaultScript:
        """Return what is left once a window has failed."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.repeats or fault.window > window))

    def strike(
        self,
        *,
        device: int,
        before: str,
        window: int,
        first_copies: Collection[int] = (),
        cut: Callable[[], object] = lambda: None,
    ) -> None:
        """Inject the faults before what this device is about to do; one of kind `raise` raises `ScriptedFault`.

        An Op that is next belongs to the `first_copies` of stages. `cut` closes the device's connections.
        """
        for fault in self.faults:
            is_here = (fault.device, fault.before) == (device, before) or fault.stage in first_copies
            if is_here and fault.window == window:
                match fault.kind:
                    case FaultKind.KILL:
                        os.kill(os.getpid(), signal.SIGKILL)
                    case FaultKind.STOP:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case FaultKind.HANG:
                        time.sleep(fault.hang_s)
                    case FaultKind.CUT:
                        cut()
                    case FaultKind.RAISE:
                        raise ScriptedFault(f"scripted fault before {before}")
