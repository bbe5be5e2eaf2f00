"""Consoles that print names as they are: no markup is read, and escape sequences in text are written out."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raypipe.errors import unseen, visible


class SafeConsole(Console):
    """Rich lets escape sequences in text through to the terminal; this writes them out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `rich.console.Console`."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or not unseen(text) else Segment(visible(text), style)


def progress_console() -> Console:
    """Return a console on stderr."""
    return SafeConsole(stderr=True, markup=False, emoji=False)
