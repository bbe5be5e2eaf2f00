"""Every error that raypipe raises on purpose.

::

    RaypipeError
    |-- InputError (ValueError)           the user's input is at fault; exit code 2
    |   |-- ConfigError                   a configuration file, key or value
    |   |-- FormatError                   a file that raypipe reads, or a value of a configuration
    |   |-- ScheduleError                 an order that cannot run; carries the marked grid
    |   |-- UnknownNameError              a name that nothing is registered under; lists the choices
    |   `-- PlanError                     a plan, its stages or its devices do not fit together
    `-- RunError (RuntimeError)           something failed while running; exit code 1
        |-- TransportError                a message did not pass between two devices
        |   `-- TransportTimeoutError     nobody answered in time
        |-- StageFailedError              a stage actor died or raised
        `-- AbortedError                  this part stopped because another part failed

Ray carries exceptions between processes by pickle, which calls `type(error)(*error.args)`. Errors with more than
a message therefore define `__reduce__`; a test sends each of them through pickle.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class RaypipeError(Exception):
    """The root of all errors that raypipe raises on purpose."""


class InputError(RaypipeError, ValueError):
    """The user's input cannot be used; the message says where, why and what to do."""


class ConfigError(InputError):
    """A configuration file, key or value cannot be used."""


class FormatError(InputError):
    """A file or a configured value is not what its format demands.

    Args:
        path: File, or what stands for it in a message.
        where: Place inside it, such as `layers[3].forward_s`; empty for the whole file.
        problem: What was expected, what was got and what to do.
    """

    def __init__(self, path: str, where: str, problem: str) -> None:
        self.path = path
        self.where = where
        self.problem = problem
        super().__init__(f"{path}: {where}: {problem}" if where else f"{path}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.path, self.where, self.problem))


class ScheduleError(InputError):
    """An order of Ops that cannot run.

    Args:
        problem: Problem with worker, position and Op.
        grid: Programs with the failing Op marked; may be empty.
    """

    def __init__(self, problem: str, grid: str = "") -> None:
        self.problem = problem
        self.grid = grid
        super().__init__(f"{problem}\n{grid}" if grid else problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.problem, self.grid))


class UnknownNameError(InputError):
    """Nothing is registered under a name.

    Args:
        what: Kind of the named object, such as "schedule".
        name: Name that was asked for.
        choices: Known names.
    """

    def __init__(self, what: str, name: str, choices: Iterable[str]) -> None:
        self.what = what
        self.name = name
        self.choices = tuple(choices)
        super().__init__(f"no {what} is called {name!r}{suggestion(name, self.choices)}; choose from: " + ", ".join(self.choices))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.what, self.name, self.choices))


class PlanError(InputError):
    """A plan, its stages, its devices or the model do not fit together."""


class RunError(RaypipeError, RuntimeError):
    """Something failed while running."""


class TransportError(RunError):
    """A message did not pass between two devices.

    Args:
        device: Device that noticed the failure.
        peer: Device at the other end.
        message: Message that was under way, in text.
        problem: What happened.
    """

    def __init__(self, device: str, peer: str, message: str, problem: str) -> None:
        self.device = device
        self.peer = peer
        self.message = message
        self.problem = problem
        super().__init__(f"device {device}: {message} with device {peer}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.device, self.peer, self.message, self.problem))


class TransportTimeoutError(TransportError):
    """The other end did not answer in time."""


class StageFailedError(RunError):
    """A stage actor died, or raised while it ran its program.

    Args:
        device: Device of the actor.
        stages: Stages that the actor holds, in text.
        node: Node that the actor ran on.
        during: Work that was under way, such as "window 3, 2B5".
        problem: What was observed.
        remedy: What to do.
    """

    def __init__(self, device: str, stages: str, node: str, during: str, problem: str, remedy: str) -> None:
        self.device = device
        self.stages = stages
        self.node = node
        self.during = during
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"stage {stages} (device {device}, node {node}) failed during {during}: {problem}; {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.device, self.stages, self.node, self.during, self.problem, self.remedy))


class AbortedError(RunError):
    """This part stopped because another part of the run failed or the user asked for it."""


# Words for messages


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest choice, or an empty text where none is near."""
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """Return a value from a file in few words."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case bool():
            return str(value).lower()
        case _:
            return shorten(ascii(value))


def shorten(text: str) -> str:
    """Return the text, cut where it is too long for a message."""
    return text if len(text) <= 60 else text[:57] + "..."
