"""The folders, links and import manners of the checkout. What imports what is held by test_architecture.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("raypipe", "actors", "schedules", "cluster_configs", "tests", "benchmarks", "examples", "docs")
LINKED = ("actors", "schedules")
SHARED = {"raypipe", "raypipe.errors", "raypipe.schedules", "raypipe.stopping"}  # what schedules load of raypipe

# The top-level names that `{statements}` loads, beyond what the interpreter loads by itself (hooks of editable installs, coverage).
LOADED_BY = """
import json, sys
before = set(sys.modules)
{statements}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# `import cupy` raises ImportError while its entry in sys.modules is None, installed or not.
IMPORT_ALL = """
import importlib, json, pkgutil, sys, traceback
sys.modules["cupy"] = None
import raypipe
failures = {}
def note(name):
    failures[name] = traceback.format_exc()
for module in pkgutil.walk_packages(raypipe.__path__, "raypipe.", onerror=note):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except BaseException:
        note(module.name)
print(json.dumps(failures))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that starts in the root of the checkout, as a user's `python -c` would."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=50)


def loaded_by(statements: str) -> set[str]:
    result = python(LOADED_BY.format(statements=statements))
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def sources() -> Iterator[Path]:
    """Yields each Python source once, by its place under a real folder."""
    yield from ROOT.glob("*.py")
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*.py") if not path.is_relative_to(ROOT / "raypipe" / folder))


def schedule_modules() -> list[str]:
    paths = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / "schedules").rglob("*.py"))
    return ["raypipe." + ".".join(path.parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folder_is_a_real_folder_at_the_root(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder).is_symlink()


@pytest.mark.parametrize("folder", LINKED)
def test_the_package_links_to_the_folder_at_the_root(folder: str) -> None:
    link = ROOT / "raypipe" / folder
    assert link.is_symlink(), f"raypipe/{folder} must be a link; where git wrote a text file, set core.symlinks and check out again"
    assert link.readlink() == Path("..") / folder, "the link must be relative, so that it holds wherever the checkout is"


@pytest.mark.parametrize("folder", LINKED)
def test_the_bare_name_of_a_linked_folder_is_refused(folder: str) -> None:
    result = python(f"import {folder}")
    assert result.returncode == 1
    assert f"ImportError: import raypipe.{folder}, not {folder}" in result.stderr


def test_importing_raypipe_loads_neither_ray_nor_torch() -> None:
    assert not loaded_by("import raypipe") & {"ray", "torch", "cupy", "pyarrow"}


@pytest.mark.parametrize("module", schedule_modules())
def test_a_schedule_module_loads_the_standard_library_errors_and_stopping_only(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    ours = {name for name in loaded if name.split(".")[0] == "raypipe"}
    assert {name.split(".")[0] for name in loaded - ours} <= sys.stdlib_module_names
    assert {name for name in ours if not name.startswith("raypipe.schedules.")} <= SHARED


def test_every_module_imports_where_cupy_is_missing() -> None:
    result = python(IMPORT_ALL)
    assert result.returncode == 0, result.stderr
    failures: dict[str, str] = json.loads(result.stdout)
    assert not failures, "\n".join(failures.values())


def test_the_types_are_shipped() -> None:
    assert (ROOT / "raypipe" / "py.typed").is_file()


def test_no_module_is_called_utils() -> None:
    assert [path for path in sources() if path.stem in {"utils", "util", "helpers", "misc"}] == []


def test_sources_are_ascii() -> None:
    assert [path for path in sources() if not path.read_bytes().isascii()] == []


def test_every_folder_of_tests_is_a_package() -> None:
    """Otherwise two test files of one name in different folders are one module to pytest and to mypy."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs git and a checkout of it")
def test_git_ignores_no_source() -> None:
    """A pattern such as `data/` without a leading slash would hide a package of that name from git, ruff and the next clone."""
    names = "\n".join(str(path.relative_to(ROOT)) for path in sources())
    result = subprocess.run(
        ["git", "check-ignore", "--stdin"], cwd=ROOT, input=names, capture_output=True, text=True, check=False, timeout=20
    )
    assert not result.stdout, f"ignored by .gitignore:\n{result.stdout}"
