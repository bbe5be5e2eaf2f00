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
    """The device does nothing for some seconds, and goes on if nobody has missed it by then."""
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
    """One fault on a device, or on whatever device has the first copy of a stage, in a window of its program.

    Attributes:
        before: Text of what the device is about to do: an Op such as `2B1`, a message such as `activation 0->1 of microbatch 2`, which
            the device sends or waits for, a sum such as `gradients of stage 1 for update 0`, `SAVE` or `CONNECT`; `None` for any Op of the
            stage.
        window: Number of the window; of a `SAVE` that of the window before it; of a `CONNECT` how often the devices of the run have met
            before, as they do when it begins, when it recovers and when layers move.
        hang_s: For how long a device hangs.
        repeats: Whether it strikes again after each recovery of the run.
    """

    device: int | None
    before: str | None
    kind: FaultKind
    window: int = 0
    hang_s: float = 3600.0
    repeats: bool = False
    stage: int | None = None

    def __post_init__(self) -> None:
        if (self.device is None) == (self.stage is None):
            raise ValueError("a fault strikes a device or a stage")
        if self.before is None and self.stage is None:
            raise ValueError("a fault on a device says before what")


@dataclass(frozen=True)
class FaultScript:
    """The faults of a run, such as `FaultScript().fail_at(device=2, before="2B1")`."""

    faults: tuple[Fault, ...] = ()

    def fail_at(
        self,
        *,
        device: int | None = None,
        stage: int | None = None,
        before: str | None = None,
        kind: FaultKind = FaultKind.RAISE,
        window: int = 0,
        hang_s: float = 3600.0,
        repeats: bool = False,
    ) -> FaultScript:
        """Return the script with one more `Fault`, on a device or a stage; raises `ValueError` where it is on none or on both."""
        return replace(self, faults=(*self.faults, Fault(device, before, kind, window, hang_s, repeats, stage)))

    def after(self, window: int) -> FaultScript:
        """Return what is left once a window has failed."""
        # How often devices meet does not depend on windows, and they never meet for the same time again.
        left = (fault for fault in self.faults if fault.repeats or fault.window > window or fault.before == CONNECT)
        return replace(self, faults=tuple(left))

    def strike(
        self,
        *,
        device: int,
        stages: Collection[int],
        before: str,
        window: int,
        is_op: bool = False,
        cut: Callable[[], object] = lambda: None,
    ) -> None:
        """Inject the faults before what this device is about to do; one of kind `raise` raises `ScriptedFault`.

        `stages` are those that it does it for, as far as it has their first copies. `cut` closes the device's connections.
        """
        for fault in self.faults:
            is_here = fault.device == device if fault.stage is None else fault.stage in stages
            is_next = fault.before == before or (fault.before is None and is_op)
            if is_here and is_next and fault.window == window:
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
