"""Where files lie that raypipe makes for itself, and can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for them on this machine; it may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "raypipe")
