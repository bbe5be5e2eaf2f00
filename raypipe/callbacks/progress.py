"""What a person sees of a run: a bar on a terminal, else plain lines."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import End, Evaluation, Run, Window
from raypipe.show.console import progress_console

_QUIET_S = 15.0


class Progress(Callback):
    """Shows a run on stderr: on a terminal with a spinner or a bar below the last line, elsewhere as lines.

    Every run has one unless `run.show_progress` is false.
    """

    def __init__(self) -> None:
        self._display: _Display | None = None

    @property
    def display(self) -> _Display:
        """What is shown; it begins with the first event and ends with the run."""
        if self._display is None:
            self._display = _Display(progress_console())
            self._display.begin()
        return self._display

    def on_notice(self, text: str) -> None:
        """See `Callback`."""
        self.display.notice(text)

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        self.display.updates.update(self.display.bar, total=run.num_updates, completed=run.first_update)

    def on_window(self, run: Run, window: Window) -> None:
        """See `Callback`."""
        self.display.window(run, window)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """See `Callback`."""
        self.display.evaluated = evaluation.update

    def on_end(self, run: Run, end: End) -> None:
        """See `Callback`."""
        self.close()

    def close(self) -> None:
        """See `Callback`."""
        display, self._display = self._display, None
        if display is not None:
            display.end()


class _Display:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps = Bar(SpinnerColumn(), TimeElapsedColumn(), console=console)
        self.step = self.steps.add_task("")
        self.updates = Bar(
            SpinnerColumn(),
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self.bar = self.updates.add_task("", total=None)
        self.has_updates = False
        self.evaluated: int | None = None
        """The update behind which the newest evaluation was."""
        self.step_text, self.step_began_s = "", time.monotonic()
        self._live = Live(self, console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._ended = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __rich__(self) -> Bar:
        return self.updates if self.has_updates and not self.updates.finished else self.steps

    def begin(self) -> None:
        if self._live is not None:
            self._live.start()
        else:
            self._teller.start()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            return
        self._ended.set()
        self._teller.join()

    def notice(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)
        self.steps.reset(self.step)
        self.step_text, self.step_began_s = text, time.monotonic()

    def window(self, run: Run, window: Window) -> None:
        self.has_updates = True
        speed = f"{window.samples_per_s:,.0f} rows/s" if window.tokens_per_s is None else f"{window.tokens_per_s:,.0f} tokens/s"
        validation = "-" if window.validation_loss is None else f"{window.validation_loss:.3f}"
        if window.validation_loss is not None and self.evaluated not in {None, window.update}:
            validation += f" (update {self.evaluated})"
        text = f"loss {window.loss:.3f}  validation {validation}  {speed}"
        if self._live is not None:
            self.updates.update(self.bar, completed=window.update, description=text)
            return
        minutes, seconds = divmod(round(window.seconds_left), 60)
        self.notice(f"update {window.update}/{run.num_updates}  {text}  left {minutes}:{seconds:02d}")
        self.step_text = f"training after update {window.update}"

    def _tell(self) -> None:
        """Without a terminal, tell every 15 s how long a step has taken."""
        told_s = 0.0
        while not self._ended.wait(max(self.step_began_s, told_s) + _QUIET_S - time.monotonic()):
            told_s = time.monotonic()
            if told_s - self.step_began_s >= _QUIET_S:
                self.console.print(f"{self.step_text}: {told_s - self.step_began_s:.0f} s so far", highlight=False, soft_wrap=True)
