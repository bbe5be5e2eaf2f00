"""Dataclasses as JSON or YAML text that opens with `format`, such as `raypipe.model_profile/1`.

Types are strict ("3" is no number, 3.0 no whole one), numbers finite, keys exact; None is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from raypipe.artifacts.files import read_text, write_text
from raypipe.artifacts.syntax import json_text, json_tree, yaml_text, yaml_tree
from raypipe.artifacts.validation import adapter, from_tree
from raypipe.errors import FormatError, InputError, shown

T = TypeVar("T")

_JSON_HEAD = re.compile(r'\s*\{\s*"format"\s*:\s*"([\w./-]+)"')


def to_json(value: object, *, format_name: str) -> str:
    """Return the value as JSON; raise `InputError` if a number is infinite or NaN."""
    return json_text(_tree(value, format_name)) + "\n"


def to_yaml(value: object, *, format_name: str) -> str:
    """Return the value as YAML; raises as `to_json`."""
    return yaml_text(_tree(value, format_name))


def digest(value: object, *, format_name: str) -> str:
    """Return sixteen hexadecimal digits, equal for values whose files mean the same."""
    text = json.dumps(_tree(value, format_name), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_json(cls: type[T], text: str, *, path: str, format_name: str) -> T:
    """Return the value in JSON text, or raise `FormatError`; a million small objects take ten seconds."""
    return _read(cls, json_tree(text, path=path), path, format_name)


def from_yaml(cls: type[T], text: str, *, path: str, format_name: str) -> T:
    """Return the value in YAML text, or raise `FormatError`."""
    return _read(cls, yaml_tree(text, path=path), path, format_name)


def load_json(cls: type[T], path: str | os.PathLike[str], *, format_name: str) -> T:
    """Return the value in a JSON file, or raise `FormatError`."""
    return from_json(cls, read_text(path), path=os.fspath(path), format_name=format_name)


def save_json(value: object, path: str | os.PathLike[str], *, format_name: str) -> None:
    """Write a value to a JSON file."""
    write_text(path, to_json(value, format_name=format_name))


def read_format(path: str | os.PathLike[str]) -> str:
    """Return the `format` of a JSON or YAML file, or raise `FormatError`."""
    name, text = os.fspath(path), read_text(path)
    if Path(path).suffix in {".yaml", ".yml"} or not text.lstrip().startswith("{"):
        tree = yaml_tree(text, path=name)
    elif head := _JSON_HEAD.match(text):
        return head[1]
    else:
        tree = json_tree(text, path=name)
    format_name = tree.get("format") if isinstance(tree, dict) else None
    if not isinstance(format_name, str):
        raise FormatError(name, "format", 'expected a name under this key, such as "raypipe.plan/1"; check that this is a file of raypipe')
    return format_name


def _tree(value: object, format_name: str) -> dict[str, Any]:
    cls: Any = type(value)
    content = adapter(cls).dump_python(value, mode="json", by_alias=True, exclude_none=True, warnings="error")
    try:
        json.dumps(content, allow_nan=False)
    except ValueError:
        raise InputError(f"cannot write {format_name}: a number in it is infinite or NaN; give finite numbers") from None
    return {"format": format_name, **content}


def _read(cls: type[T], tree: object, path: str, format_name: str) -> T:
    if not isinstance(tree, dict):
        raise FormatError(
            path, "", f"expected an object with the keys of {format_name}, got {shown(tree)}; check that this is the right file"
        )
    stated = tree.pop("format", None)
    if stated != format_name:
        problem = f"expected {format_name!r}, got {shown(stated)}; check that this is the right file, of this version of raypipe"
        raise FormatError(path, "format", problem)
    value: T = from_tree(cls, tree, path=path)
    return value
