"""docs/configuration.md is made of the configuration's classes: `pytest --regenerate-golden tests/test_configuration_page.py` writes it."""

from __future__ import annotations

import re
import types
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from docstring_parser import parse

from raypipe.config import TrainConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

All that `raypipe train CONFIG` can be told: a YAML file that begins with `format: raypipe.train/1`, and has these sections. Only
`model.function` and `data.path` have no default. `--set section.key=value` replaces a value, and every run writes the file with all of its
values into its folder. From Python the sections are the arguments of `raypipe.Trainer`: `ScheduleConfig(name="zb-h1")` and so on.

This page is made of `raypipe/config.py` (`pytest --regenerate-golden tests/test_configuration_page.py`).
"""


def type_text(hint: Any) -> str:
    """A type as people write it."""
    if get_origin(hint) in {Union, types.UnionType}:
        return " or ".join("nothing" if option is type(None) else type_text(option) for option in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return " or ".join(f"`{member}`" for member in hint)
    names = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`"}
    if hint in names:
        return names[hint]
    return "list of " + type_text(get_args(hint)[0]) + "s" if get_origin(hint) is tuple else "keys and values"


def default_text(field: Field[Any]) -> str:
    """A default as it would stand in the file."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return "needed"
    if value is None or value in ("", (), {}):
        return "left out"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def section(name: str, kind: type[Any], text: str) -> str:
    """A section of the page: one line a key."""
    hints = get_type_hints(kind)
    said = {parameter.arg_name: parameter.description or "" for parameter in parse(kind.__doc__ or "").params}
    lines = [f"## `{name}`", "", text, "", "| key | what | default | meaning |", "|---|---|---|---|"]
    for field in fields(kind):
        meaning = re.sub(r"\s+", " ", said[field.name])
        lines.append(f"| `{field.name}` | {type_text(hints[field.name])} | {default_text(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    said = {parameter.arg_name: parameter.description or "" for parameter in parse(TrainConfig.__doc__ or "").params}
    hints = get_type_hints(TrainConfig)
    names = [field.name for field in fields(TrainConfig)]
    parts = [section(name, hints[name], (hints[name].__doc__ or "").splitlines()[0]) for name in names if name != "plan"]
    return "\n".join([HEAD, *parts, "## `plan`\n", re.sub(r"\s+", " ", said["plan"])]) + "\n"


def test_the_page_of_the_configuration_is_what_its_classes_say(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--regenerate-golden"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: pytest --regenerate-golden tests/test_configuration_page.py"
