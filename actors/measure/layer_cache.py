"""Measurements of layers from earlier runs, on the machine that measured them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path

import torch

from raypipe.actors.measure.alike import LayerKey
from raypipe.actors.measure.layer_costs import LayerMeasurement
from raypipe.artifacts.versions import versions
from raypipe.config import cache_folder


class LayerCache:
    """One file for each layer, kind of device and way to measure; what cannot be read or written is measured.

    Args:
        on: Device that measures.
        context: Whatever else the times depend on, such as precision and optimizer.
    """

    def __init__(self, on: torch.device, *context: object) -> None:
        known = versions()
        measured = [field.name for field in dataclasses.fields(LayerMeasurement)]
        parts = (_kind(on), torch.get_num_threads(), known["python"], known["torch"], known["raypipe"], measured, *context)
        self._context = repr(parts)
        self._folder = cache_folder() / "layers"

    def get(self, key: LayerKey) -> LayerMeasurement | None:
        """Return what an earlier run measured of such a layer, if one did."""
        if not key.is_known:
            return None
        with contextlib.suppress(OSError, ValueError, TypeError):
            return LayerMeasurement(**json.loads(self._file(key).read_text()))
        return None

    def put(self, key: LayerKey, measured: LayerMeasurement) -> None:
        """Keep a measurement for later runs."""
        if not key.is_known:
            return
        path = self._file(key)
        beside = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(dataclasses.asdict(measured)))
            beside.replace(path)

    def _file(self, key: LayerKey) -> Path:
        digest = hashlib.sha256(f"{self._context}\n{key.structure}\n{key.operators}".encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


def _kind(on: torch.device) -> str:
    if on.type == "cuda":
        return torch.cuda.get_device_name(on)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
