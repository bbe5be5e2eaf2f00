"""The versions of what a result depends on."""

from __future__ import annotations

import os
import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """The versions of what a run depends on, and the machine of the driver."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "cores": str(os.cpu_count())}
    for package in ("raypipe", "torch", "ray", "numpy", "pyarrow", "safetensors", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
