"""The folder in which a new run begins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from raypipe.artifacts.checkpoint_files import FOLDER
from raypipe.artifacts.storage import Storage
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, FormatError
from raypipe.run_config import RunConfig
from raypipe.training.run_folder import CONFIG, FAILURE, METRICS, RunFolder
from raypipe.training.run_lock import RunLock

_TRACE = "trace"  # begins the names of traces


def new_run(config: RunConfig, notice: Callable[[str], None]) -> tuple[RunFolder, RunLock]:
    """Return the folder of a new run, and its lock, which is held.

    Of the folders called `run.name`, `run.name-2` and so on it is the last one if its run ended before it trained, else another one.

    Raises:
        ConfigError: The folder cannot be made.
    """
    before = RunFolder.last(config.storage_path, config.name)
    if before is not None and _ended_before_training(before.storage, config.name):
        lock = RunLock(before.storage)
        with contextlib.suppress(ConfigError, OSError):  # another process begins there at this moment
            lock.acquire(notice)
            if _ended_before_training(before.storage, config.name):
                before.clear()
                notice(f"{before.name}: its run ended before it trained, and begins again")
                return before, lock
        lock.release()
    folder = RunFolder.create(config.storage_path, config.name)
    lock = RunLock(folder.storage)
    lock.acquire(notice)
    return folder, lock


def _ended_before_training(folder: Storage, name: str) -> bool:
    try:
        names = set(folder.names())
        # The records of a run at a URI are copied there at its end: without a reason of its end, some may be missing.
        if not names >= ({CONFIG} if folder.is_local else {CONFIG, FAILURE}):
            return False
        if names & {METRICS, FOLDER} or any(one.startswith(_TRACE) for one in names):
            return False
        # `gpt-2` may be the second run of `gpt`, or one called `gpt-2`.
        return TrainConfig.from_text(folder.read(CONFIG).decode(), path=f"{folder.name}/{CONFIG}").run.name == name
    except (OSError, UnicodeDecodeError, FormatError):
        return False
