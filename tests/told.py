"""A callback that keeps what a run says."""

from __future__ import annotations

from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.training.trainer import Trainer


class Told(Callback):
    """Keeps lines and windows."""

    required = True  # a failing assertion shall fail the test

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.windows: list[Window] = []

    def on_notice(self, text: str) -> None:
        self.texts.append(text)

    def on_window(self, run: Run, window: Window) -> None:
        self.windows.append(window)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.texts)


def telling(trainer: Trainer, *callbacks: Callback) -> Trainer:
    """A trainer that also tells these callbacks."""
    trainer.callbacks += callbacks
    return trainer
