"""Builds the sdist, the wheel from the sdist, and uses the wheel where nothing but its declared dependencies is installed.

A script, not a test: it installs torch and Ray anew and takes minutes. `make wheel-test` calls it.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Importing each module finds what the code uses and the wheel does not declare.
IMPORT_ALL = """
import importlib, pkgutil, raypipe
names = [module.name for module in pkgutil.walk_packages(raypipe.__path__, "raypipe.") if not module.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(f"imported {len(names)} modules from {raypipe.__path__[0]}")
"""


def main() -> None:
    """Exits with a message, or with the failed command's output, where the wheel is not fit for use."""
    with tempfile.TemporaryDirectory(prefix="raypipe-wheel-") as folder:
        work = Path(folder)
        say("building the sdist and the wheel")
        run(sys.executable, "-m", "build", "--outdir", work / "dist", ROOT, cwd=work, quiet=True)
        (wheel,) = (work / "dist").glob("*.whl")
        if problems := list(packing_problems(wheel)):
            sys.exit("\n".join(problems))

        say("installing the wheel into an empty venv")
        python, raypipe = work / "venv/bin/python", work / "venv/bin/raypipe"
        run(sys.executable, "-m", "venv", work / "venv", cwd=work)
        run(python, "-m", "pip", "install", "--disable-pip-version-check", "-qq", "-c", ROOT / "constraints.txt", wheel, cwd=work)

        # From an empty folder, so that no checkout can stand in for what the wheel lacks.
        (empty := work / "empty").mkdir()
        run(python, "-c", "import raypipe.schedules, raypipe.actors", cwd=empty)
        run(python, "-c", IMPORT_ALL, cwd=empty)
        run(raypipe, "schedules", cwd=empty)
        say(f"the wheel works: {wheel.name}")


def packing_problems(wheel: Path) -> Iterable[str]:
    """Yields what is wrong with the list of files in the wheel.

    The folders at the root must be under raypipe/ and be files: a link, or a second top-level name, would break the one import name.
    """
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    packed = {entry.filename for entry in entries}
    package = {name for name in packed if name.startswith("raypipe/")}
    expected = {path.relative_to(ROOT).as_posix() for path in files_of(ROOT / "raypipe")}
    expected |= {f"raypipe/{path.relative_to(ROOT).as_posix()}" for folder in ("actors", "schedules") for path in files_of(ROOT / folder)}
    faults = {
        "a link, not a file": {entry.filename for entry in entries if stat.S_ISLNK(entry.external_attr >> 16)},
        "in the checkout but not in the wheel": expected - package,
        "in the wheel but not in the checkout": package - expected,
        "outside of raypipe/": {name for name in packed if not name.startswith(("raypipe/", "raypipe-"))},
    }
    for fault, names in faults.items():
        if names:
            yield f"{wheel.name}: {fault}: {', '.join(sorted(names))}"


def files_of(folder: Path) -> Iterable[Path]:
    """Yields the files under a folder, without following links and without what Python caches."""
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def run(*command: str | Path, cwd: Path, quiet: bool = False) -> None:
    """Runs a command that must succeed; with `quiet`, its output is shown only where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, cwd=cwd, env=environment, check=False, text=True, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT
    )
    if result.returncode:
        sys.exit(f"{result.stdout or ''}failed with exit code {result.returncode}: {' '.join(map(str, command))}")


def say(text: str) -> None:
    """Prints at once, so that the line stands before the output of the command that it announces."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
