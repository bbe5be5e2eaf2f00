"""docs/configuration.md is made from the configuration's JSON schema: `pytest --regenerate-golden tests/test_configuration_page.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from docstring_parser import parse
from pydantic import TypeAdapter

from raypipe.config import TrainConfig

SCHEMA = TypeAdapter(TrainConfig).json_schema()
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

All that `raypipe train CONFIG` can be told: a YAML file that begins with `format: raypipe.train/1`, and has these sections. Only
`model.function` has no default, and one of `data.path` and `data.train` is needed. `--set section.key=value` replaces a value, and every
run writes the file with all of its values into its folder. From Python the sections are the arguments of `raypipe.Trainer`:
`ScheduleConfig(name="zb-h1")` and so on. What a program gave and no name stands for, such as a loader or a function of a
notebook, is written as `(given in Python) NAME`: such a run is started from its program only.

This page is made from `raypipe/config.py` (`pytest --regenerate-golden tests/test_configuration_page.py`).
"""


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference leads to, or the schema itself."""
    found: dict[str, Any] = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return found


def meanings(schema: dict[str, Any]) -> dict[str, str]:
    """The lines of a class's docstring about its attributes."""
    return {line.arg_name: re.sub(r"\s+", " ", line.description or "") for line in parse(schema["description"]).params}


def type_text(schema: dict[str, Any]) -> str:
    """A type as people write it."""
    if "anyOf" in schema:
        return " or ".join(type_text(option) for option in schema["anyOf"])
    schema = resolved(schema)
    if "enum" in schema:
        return " or ".join(f"`{member}`" for member in schema["enum"])
    if schema["type"] == "array":
        of_items = "of keys and values" if resolved(schema["items"]).get("type") == "object" else f"of {type_text(schema['items'])}s"
        return f"list {of_items}"
    names = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true` or `false`", "null": "nothing"}
    limits = [f"{sign} {schema[key]:,.15g}" for key, sign in LIMITS.items() if key in schema]
    return " ".join([names.get(schema["type"], "keys and values"), " and ".join(limits)]).strip()


def default_text(name: str, field: dict[str, Any], required: list[str]) -> str:
    """A default as it would stand in the file."""
    if name in required:
        return "needed"
    value = field.get("default")
    return "left out" if value in (None, "", [], {}) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def section(name: str, schema: dict[str, Any]) -> str:
    """A section of the page: one line a key."""
    said = meanings(schema)
    level = "###" if "." in name else "##"
    lines = [f"{level} `{name}`", "", schema["description"].splitlines()[0], "", "| key | what | default | meaning |", "|---|---|---|---|"]
    parts = []
    for key, field in schema["properties"].items():
        lines.append(f"| `{key}` | {type_text(field)} | {default_text(key, field, schema.get('required', []))} | {said[key]} |")
        if "properties" in (of_items := resolved(field.get("items", {}))):
            parts.append(section(f"{name}.{key}", of_items))
    return "\n".join(["\n".join(lines) + "\n", *parts])


PLAN = ("## `plan`\n", meanings(SCHEMA)["plan"])


def page() -> str:
    """The whole page."""
    parts = [section(name, resolved(field)) for name, field in SCHEMA["properties"].items() if name not in {"callbacks", "plan"}]
    callbacks = section("callbacks", resolved(SCHEMA["properties"]["callbacks"]["items"])).rstrip("\n")
    return "\n".join([HEAD, *parts, callbacks, "\nA list of these. [Callbacks](callbacks.md) has the bundled ones.\n", *PLAN]) + "\n"


def test_the_page_of_the_configuration_is_what_its_classes_say(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--regenerate-golden"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: pytest --regenerate-golden tests/test_configuration_page.py"
