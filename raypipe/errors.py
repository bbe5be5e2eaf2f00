"""Every error that raypipe raises on purpose; its class shows the command's exit code.

::

    RaypipeError
    |-- InputError (ValueError)           exit code 2
    |   |-- ConfigError
    |   |-- FormatError
    |   |-- ScheduleError
    |   |-- UnknownNameError
    |   `-- PlanError
    |       |-- NoLinkError
    |       `-- NoPlanYetError
    `-- RunError (RuntimeError)           exit code 1
        |-- TransportError
        |   `-- TransportTimeoutError
        |-- StageFailedError
        |   `-- StageRaisedError
        |-- StateLostError
        |-- NonFiniteError
        |-- RunTakenOverError
        |-- CallbackError
        `-- AbortedError

Pickle calls `type(error)(*error.args)`, so errors with more than a message define `__reduce__`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any


class RaypipeError(Exception):
    """Root of all errors that raypipe raises on purpose."""


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
    """An order of Ops that cannot run; `grid` shows the programs with the failing Op marked, or is empty."""

    def __init__(self, problem: str, grid: str = "") -> None:
        self.problem = problem
        self.grid = grid
        super().__init__(f"{problem}\n{grid}" if grid else problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.problem, self.grid))


class UnknownNameError(InputError):
    """Nothing of this kind is registered under a name; the message lists the choices."""

    def __init__(self, what: str, name: str, choices: Iterable[str]) -> None:
        self.what = what
        self.name = name
        self.choices = tuple(choices)
        super().__init__(f"no {what} is called {name!r}{suggestion(name, self.choices)}; choose from: " + ", ".join(self.choices))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.what, self.name, self.choices))


class PlanError(InputError):
    """A plan, its stages, its devices or the model do not fit together."""


class NoLinkError(PlanError):
    """Two devices that would communicate have no link."""


class NoPlanYetError(PlanError):
    """A search for a plan was stopped before it found one that fits."""


class RunError(RaypipeError, RuntimeError):
    """Something failed while running."""


class TransportError(RunError):
    """A message did not pass between two devices; `device` noticed it."""

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


class StateLostError(RunError):
    """No copy of some layers is left in the memory of any node."""


class StageFailedError(RunError):
    """A stage actor died, or raised `during` some work, such as "window 3, 2B5"."""

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


class StageRaisedError(StageFailedError):
    """A stage's own code, such as the model's, raised an error."""


class NonFiniteError(RunError):
    """A loss, a gradient, a weight or a moment of the optimizer is infinite or no number."""


class RunTakenOverError(RunError):
    """Another process writes the folder of this run, as happens after this one was suspended for long."""


class CallbackError(RunError):
    """A callback raised an error in one of its methods."""

    def __init__(self, callback: str, hook: str, problem: str) -> None:
        self.callback = callback
        self.hook = hook
        self.problem = problem
        super().__init__(f"callback {callback} failed in {hook}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.callback, self.hook, self.problem))


class AbortedError(RunError):
    """This part stopped because another part failed or the user asked for it."""


# Words for messages


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest choice, or nothing."""
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What moves the cursor, colors the terminal or turns the order of characters; line feeds and tabs do not."""


def unseen(text: str) -> re.Match[str] | None:
    """Return the first character that a terminal does not show but obeys, if there is one."""
    return _UNSEEN.search(text)


def visible(text: str) -> str:
    r"""Return the text with what a terminal would obey written out, such as `\x1b`."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


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
    """Return the text, cut if too long for a message."""
    return text if len(text) <= 60 else text[:57] + "..."
