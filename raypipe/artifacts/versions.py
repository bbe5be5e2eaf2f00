"""The versions of software and machine that a result depends on."""

from __future__ import annotations

import os
import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Return the versions of python, raypipe and its libraries, and the driver's machine."""
    known = {"python": platform.python_version(), "platform": platform.platform(), "cores": str(os.cpu_count())}
    known["raypipe"] = "not installed"  # run from its folder
    for package in ("raypipe", "torch", "ray", "numpy", "pyarrow", "safetensors", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return known
