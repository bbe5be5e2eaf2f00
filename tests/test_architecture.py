"""Imports point one way, and the library keeps off what does not belong in it; read from the sources, without running them."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The folders, and the few modules beside them, from the ground up. A unit may import the floors below its own, and units of its own
# floor as long as no cycle arises. Every import runs `__init__` first, which is why it stands at the ground.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__init__", "errors", "stopping", "units"),
    ("schedules",),
    ("artifacts", "communication"),
    ("model", "config", "optimizer_config", "run_config", "learning_rates", "user_code", "schedule_registry"),
    ("data", "models", "network", "simulation"),
    ("planning", "analysis"),
    ("show", "actors"),
    ("cluster",),
    ("profiling", "callbacks"),
    ("training",),
    ("hf",),
    ("cli", "__main__"),
)
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
STANDARD_LIBRARY_ONLY = {"__init__", "errors", "stopping", "units", "schedules", "communication"}
COMMAND_LINE = {"cli", "__main__"}

# What needs a cluster or takes seconds to load; nothing outside of these folders may.
HEAVY = {"ray", "torch", "cupy"}
HEAVY_FOLDERS = {"models", "actors", "cluster", "profiling", "callbacks", "training", "hf"} | COMMAND_LINE

# Distributions that are not called like the module they hold. Pydantic requires pydantic_core in the one version that fits it.
DISTRIBUTION_OF = {
    "PIL": "pillow",
    "cupy": "cupy-cuda12x",
    "mlflow": "mlflow-skinny",
    "easy_vqa": "easy-vqa",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "svg": "svg.py",
    "yaml": "pyyaml",
}

SYS_PATH_EDITS = {f"sys.path.{method}" for method in ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort")}


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is `a.b.c`."""

    name: str
    line: int
    typing_only: bool
    in_function: bool

    @property
    def top(self) -> str:
        return self.name.split(".", maxsplit=1)[0]


@dataclass(frozen=True)
class Source:
    """One module of the library: its dotted name, its place, and what it says."""

    module: str
    path: str
    tree: ast.Module

    @property
    def unit(self) -> str:
        return self.module.split(".")[1] if "." in self.module else "__init__"

    @property
    def floor(self) -> int:
        return FLOOR_OF.get(self.unit, len(FLOORS))

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports_in(self.tree, typing_only=False, in_function=False))

    def _imports_in(self, node: ast.AST, *, typing_only: bool, in_function: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, typing_only, in_function)
            case ast.ImportFrom(names=names):
                for alias in names:
                    yield Import(f"{self._origin(node)}.{alias.name}", node.lineno, typing_only, in_function)
            case ast.If(test=test) if ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
                for statement in node.body:
                    yield from self._imports_in(statement, typing_only=True, in_function=in_function)
                for statement in node.orelse:
                    yield from self._imports_in(statement, typing_only=typing_only, in_function=in_function)
            case _:
                inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for child in ast.iter_child_nodes(node):
                    yield from self._imports_in(child, typing_only=typing_only, in_function=inside)

    def _origin(self, node: ast.ImportFrom) -> str:
        """Returns the absolute name of what stands between `from` and `import`."""
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        package = parts if self.path.endswith("__init__.py") else parts[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])

    def imported_units(self) -> Iterator[tuple[str, Import]]:
        """Yields the other units that this module imports.

        What `raypipe/__init__.py` imports for type checkers it hands on when it is asked, and is no import of its own.
        """
        for imported in self.imports:
            if imported.top == "raypipe" and not (self.unit == "__init__" and imported.typing_only):
                second = imported.name.split(".")[1] if "." in imported.name else "__init__"
                unit = second if second in known_units() else "__init__"  # `from raypipe import __version__`
                if unit != self.unit:
                    yield unit, imported

    def names(self) -> Iterator[tuple[str, ast.expr]]:
        """Yields every name and dotted name, written out from what was imported: after `import torch as t`, `t.x` is `torch.x`."""
        aliases: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                aliases |= {alias.asname or alias.name: f"{self._origin(node)}.{alias.name}" for alias in node.names}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute) and (written := written_name(node)):
                first, dot, rest = written.partition(".")
                yield aliases.get(first, first) + dot + rest, node

    def called_names(self) -> Iterator[tuple[str, ast.expr]]:
        called = {id(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        return ((name, node) for name, node in self.names() if id(node) in called)


def written_name(node: ast.expr) -> str:
    """Returns `a.b.c` for what is written so, and an empty text for an attribute of anything else, such as `f().b`."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute) if origin := written_name(value):
            return f"{origin}.{attribute}"
        case _:
            return ""


def source(module: str, path: Path, text: str) -> Source:
    return Source(module, path.as_posix(), ast.parse(text, str(path)))


@cache
def library() -> list[Source]:
    """Reads raypipe as it is installed: the folders that it links to under its own name."""
    paths = [(path, path.relative_to(ROOT)) for path in (ROOT / "raypipe").rglob("*.py")]
    for folder in ("actors", "schedules"):
        paths += [(path, Path("raypipe") / path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")]
    # Where links are followed, a linked file comes twice; once is enough.
    by_module = {".".join(place.with_suffix("").parts).removesuffix(".__init__"): (path, place) for path, place in paths}
    return [source(module, place, path.read_text(encoding="utf-8")) for module, (path, place) in sorted(by_module.items())]


@cache
def known_units() -> set[str]:
    return set(FLOOR_OF) | {path.stem for path in (ROOT / "raypipe").iterdir()}


def upward_imports(source: Source) -> Iterator[str]:
    for unit, imported in source.imported_units():
        if FLOOR_OF.get(unit, 0) > source.floor:
            yield f"{source.path}:{imported.line}: {source.unit} imports {unit}, which stands above it"
        elif unit == "__init__" and not imported.name.endswith("__") and "." in imported.name:
            yield f"{source.path}:{imported.line}: {imported.name} is there for users; import it from the module that defines it"


def heavy_imports(source: Source) -> Iterator[str]:
    names = ", ".join(sorted(HEAVY_FOLDERS))
    for imported in source.imports:
        if imported.top in HEAVY and not imported.typing_only:
            if source.unit not in HEAVY_FOLDERS:
                yield f"{source.path}:{imported.line}: {imported.top} may be imported in {names} only"
            elif source.unit in COMMAND_LINE and not imported.in_function:
                yield f"{source.path}:{imported.line}: the command line imports {imported.top} inside the function that needs it"


def undeclared_imports(source: Source) -> Iterator[str]:
    for imported in source.imports:
        if imported.top in sys.stdlib_module_names or imported.top == "raypipe":
            continue
        if source.unit in STANDARD_LIBRARY_ONLY:
            yield f"{source.path}:{imported.line}: {source.unit} imports the standard library only, not {imported.top}"
        elif DISTRIBUTION_OF.get(imported.top, imported.top).lower() not in declared_distributions():
            yield f"{source.path}:{imported.line}: {imported.top} is no dependency in pyproject.toml"


def private_names(source: Source) -> Iterator[str]:
    """Yields uses of names that ray, torch or cupy may take away without notice."""
    for imported in source.imports:
        if imported.top in HEAVY and any(is_private(part) for part in imported.name.split(".")):
            yield f"{source.path}:{imported.line}: {imported.name} is private"
    for name, node in source.names():
        if isinstance(node, ast.Attribute) and name.split(".")[0] in HEAVY and is_private(node.attr):
            yield f"{source.path}:{node.lineno}: {name} is private"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def prints(source: Source) -> Iterator[str]:
    if source.unit not in COMMAND_LINE:
        for name, node in source.called_names():
            if name in {"print", "builtins.print", "rich.print"}:
                yield f"{source.path}:{node.lineno}: the library does not print; log, or return the text"


def logging_set_ups(source: Source) -> Iterator[str]:
    if source.unit not in COMMAND_LINE:
        for name, node in source.called_names():
            if name == "logging.basicConfig":
                yield f"{source.path}:{node.lineno}: logging is set up by the command line, or by the user's program"


def import_path_edits(source: Source) -> Iterator[str]:
    edited = {id(node) for node in ast.walk(source.tree) if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)}
    edited |= {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Subscript) and id(node) in edited}
    calls = (node for name, node in source.called_names() if name in SYS_PATH_EDITS)
    assignments = (node for name, node in source.names() if name == "sys.path" and id(node) in edited)
    for node in (*calls, *assignments):
        yield f"{source.path}:{node.lineno}: sys.path is not the library's to edit"


@cache
def declared_distributions() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name, lines in extras.items() if name != "dev" for line in lines)]
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in wanted}


Rule = Callable[[Source], Iterator[str]]
RULES: tuple[Rule, ...] = (
    upward_imports,
    heavy_imports,
    undeclared_imports,
    private_names,
    prints,
    logging_set_ups,
    import_path_edits,
)


def test_every_module_has_a_floor() -> None:
    for module in library():
        assert module.unit in FLOOR_OF, f"{module.path} is on no floor; add {module.unit!r} to TIERS in tests/test_architecture.py"


def test_no_unit_has_two_floors() -> None:
    assert sum(len(units) for units in FLOORS) == len(FLOOR_OF)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_library_has_no(rule: Rule) -> None:
    complaints = [complaint for module in library() for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


def test_units_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in library():
        graph.setdefault(module.unit, set()).update(unit for unit, _ in module.imported_units())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]), pytrace=False)


# Without these, a rule that finds nothing in any text would pass for a library that has no faults.
@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [
        (upward_imports, "raypipe.simulation.cost", "from raypipe.planning.layout import Layout"),
        (upward_imports, "raypipe.simulation.cost", "import raypipe.planning.layout"),
        (upward_imports, "raypipe.simulation.cost", "from raypipe import planning"),
        (upward_imports, "raypipe.simulation.cost", "from .. import planning"),
        (upward_imports, "raypipe.simulation.cost", "from ..planning.layout import Layout"),
        (upward_imports, "raypipe.simulation.cost", "def f():\n    import raypipe.planning"),
        (upward_imports, "raypipe.simulation.cost", "if TYPE_CHECKING:\n    import raypipe.planning"),
        (upward_imports, "raypipe.simulation.cost", "from raypipe import Trainer"),
        (upward_imports, "raypipe", "from raypipe.training.trainer import Trainer"),
        (upward_imports, "raypipe.schedules.ir", "from ..artifacts.topology import Link"),
        (upward_imports, "raypipe.errors", "from raypipe.schedules import ir"),
        (heavy_imports, "raypipe.simulation.simulator", "import torch.nn"),
        (heavy_imports, "raypipe.planning.exact", "def f():\n    from ray import get"),
        (heavy_imports, "raypipe.model", "if TYPE_CHECKING:\n    pass\nelse:\n    import cupy"),
        (heavy_imports, "raypipe.cli", "import ray"),
        (undeclared_imports, "raypipe.schedules.ir", "import yaml"),
        (undeclared_imports, "raypipe.training.trainer", "import pandas"),
        (private_names, "raypipe.actors.actor", "import ray._private.worker"),
        (private_names, "raypipe.actors.actor", "import ray\nray._private.worker"),
        (private_names, "raypipe.actors.actor", "from torch import _C"),
        (private_names, "raypipe.actors.actor", "import torch.distributed as dist\ndist._shutdown()"),
        (private_names, "raypipe.actors.actor", "def f():\n    from torch import autograd\n    autograd._x.y()"),
        (prints, "raypipe.actors.actor", "print(1)"),
        (logging_set_ups, "raypipe.training.trainer", "import logging\nlogging.basicConfig()"),
        (logging_set_ups, "raypipe.training.trainer", "from logging import basicConfig as set_up\nset_up(level=1)"),
        (import_path_edits, "raypipe.training.trainer", "import sys\nsys.path.insert(0, '.')"),
        (import_path_edits, "raypipe.training.trainer", "from sys import path\npath.append('.')"),
        (import_path_edits, "raypipe.training.trainer", "import sys\nsys.path[0] = '.'"),
        (import_path_edits, "raypipe.training.trainer", "import sys\nsys.path += ['.']"),
        (import_path_edits, "raypipe.training.trainer", "import sys\ndel sys.path[0]"),
    ],
)
def test_a_planted_fault_is_found(rule: Rule, module: str, text: str) -> None:
    planted = source(module, Path(module.replace(".", "/") + ".py"), text)
    assert len(list(rule(planted))) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("raypipe.simulation.simulator", "from raypipe.simulation.cost import seconds\nfrom raypipe import __version__"),
        ("raypipe.show", "from raypipe.artifacts.trace import Trace"),
        ("raypipe", "if TYPE_CHECKING:\n    from raypipe.training.trainer import Trainer"),
        ("raypipe.schedules.families.gpipe", "from .ir import Op\nfrom ..errors import ScheduleError"),
        ("raypipe.model", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import nn"),
        ("raypipe.actors.actor", "import torch\ntorch.__version__\nself._torch = torch.nn\nself._torch._x"),
        ("raypipe.cli", "def train():\n    import ray\n    print(ray.__version__)"),
        ("raypipe.artifacts.codec", "import yaml"),
        ("raypipe.training.trainer", "import sys\nfolders = list(sys.path)"),
    ],
)
def test_what_is_allowed_is_left_alone(module: str, text: str) -> None:
    allowed = source(module, Path(module.replace(".", "/") + ".py"), text)
    assert [complaint for rule in RULES for complaint in rule(allowed)] == []
