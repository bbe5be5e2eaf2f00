"""The GPU that tests compute on: CUDA's where there is one, else a device that stands in for it (`stand_in.cpp`)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

_SOURCE = Path(__file__).with_name("stand_in.cpp")
_BUILDS = Path(__file__).parents[2] / "build" / "stand_in"
HAS_CUDA = torch.cuda.is_available()


class _Event:
    """An event of the stand-in, whose host has done what it was told."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at_s = 0.0

    def record(self, stream: object = None) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 1000 * (other.at_s - self.at_s)


def gpu() -> torch.device:
    """The device; the test is skipped where there is neither a GPU nor a compiler."""
    return torch.device("cuda", 0) if HAS_CUDA else _stand_in()


def forbid_waits(forbidden: bool) -> None:
    """Makes a host that waits for the device an error, from now on, in this thread at least."""
    if HAS_CUDA:
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
    else:
        torch.ops.stand_in.forbid(forbidden)


def _stand_in() -> torch.device:
    name = "stand_in"
    if torch._C._get_privateuse1_backend_name() != name:
        torch.ops.load_library(_built())  # type: ignore[no-untyped-call]
        backend_registration.rename_privateuse1_backend(name)
        module = types.ModuleType(f"torch.{name}")
        for key, value in {
            "Event": _Event,
            "Stream": lambda _: None,
            "stream": nullcontext,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "current_stream": lambda: None,
            "synchronize": lambda *_: None,
            "manual_seed_all": lambda _: None,
            "get_amp_supported_dtype": lambda: [torch.bfloat16],
            "_is_in_bad_fork": lambda: False,
        }.items():
            setattr(module, key, value)
        torch._register_device_module(name, module)  # type: ignore[no-untyped-call]
        backend_registration.generate_methods_for_privateuse1_backend()
    return torch.device(name, 0)


def _built() -> Path:
    """The library, compiled when this torch first needs it."""
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a GPU, or a C++ compiler for a device that stands in for one")
    key = hashlib.blake2b(_SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()
    library = _BUILDS / f"stand_in-{key}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, of which one compiles
        if library.exists():
            return library
        partial = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-isystem{folder}" for folder in cpp_extension.include_paths()]
        command += [str(_SOURCE), *(f"-L{folder}" for folder in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu", "-o", str(partial)]
        done = subprocess.run(command, check=False, timeout=300)
        if done.returncode:
            pytest.skip(f"needs a GPU, or a compiler of C++20 and a torch for which {_SOURCE.name} compiles; see what it wrote")
        partial.rename(library)
    return library
