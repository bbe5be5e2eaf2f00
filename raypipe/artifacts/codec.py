"""Turns frozen dataclasses into JSON or YAML text and back; the one place that knows how.

The dataclasses stay plain: pydantic reads their annotations from outside. What holds for every format:

* The text opens with `format`, such as `raypipe.model_profile/1`.
* Types are strict: "3" and true are no numbers, 3.0 is no whole number, 3 is a number. Numbers are finite, whole ones fit 64 bits:
  what may be unlimited is an optional field that is None.
* A field that is None is left out; None must therefore be its default.
* Unknown, repeated and missing keys are errors, at every depth, whatever the classes say about it.
* Whatever the text, reading it gives the value or one `FormatError`: the first problem and how many more there are.

A class states its own limits in `__post_init__` by raising a ValueError; `invalid` makes one that also names the field.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from raypipe.artifacts.tree import below, json_text, json_tree, read_text, shown, write_text, yaml_text, yaml_tree
from raypipe.errors import FormatError, InputError, suggestion

__all__ = [
    "config",
    "digest",
    "from_json",
    "from_yaml",
    "invalid",
    "read_format",
    "read_text",
    "require_amounts",
    "to_json",
    "to_yaml",
    "write_text",
]

T = TypeVar("T")

_JSON_HEAD = re.compile(r'\s*\{\s*"format"\s*:\s*"([\w./-]+)"')
_UNKNOWN_KEY = {"unexpected_keyword_argument", "extra_forbidden"}
_EXPECTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "string_type": "text (quote it where it looks like something else)",
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "tuple_type": "a list",
    "list_type": "a list",
}


def config(**file_names: str) -> dict[str, object]:
    """The `__pydantic_config__` of a class of whose fields some bear another name in files.

    Args:
        file_names: the name in files of each such field: `config(source="from", target="to")`.
    """
    return {"extra": "forbid", "alias_generator": lambda field: file_names.get(field, field)}


def invalid(owner: object, where: str, problem: str) -> FormatError:
    """The error with which `__post_init__` refuses a field; reading a file puts its path and the place of the owner before it.

    Args:
        owner: the object that is being made.
        where: the field by its name in files, or a place below it, such as `links[2].from`.
        problem: what was expected, what was got and what to do.
    """
    return FormatError(type(owner).__name__, where, problem)


def require_amounts(owner: object, *fields: str, above_zero: bool = False, remedy: str = "") -> None:
    """Refuses fields that are neither None nor a finite number of at least (or above) zero.

    Raises:
        FormatError: names the first such field.
    """
    for field in fields:
        value = getattr(owner, field)
        if value is not None and not (math.isfinite(value) and value >= 0 and (value or not above_zero)):
            limit = "> 0" if above_zero else ">= 0"
            raise invalid(owner, field, f"expected a finite number {limit}, got {value}" + (f"; {remedy}" if remedy else ""))


def to_json(value: object, *, format_name: str) -> str:
    """The value as JSON, broken into lines only where a part is wider than a page.

    Raises:
        InputError: a number in it is infinite or NaN, for which JSON has no word.
    """
    return json_text({"format": format_name, **_plain(value, format_name)}) + "\n"


def to_yaml(value: object, *, format_name: str) -> str:
    """The value as YAML, its innermost objects and lists on one line each; raises as `to_json`."""
    return yaml_text({"format": format_name, **_plain(value, format_name)})


def digest(value: object, *, format_name: str) -> str:
    """Sixteen hexadecimal digits that stand for the content: equal for values whose files mean the same."""
    text = json.dumps({"format": format_name, **_plain(value, format_name)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_json(cls: type[T], text: str, *, path: str, format_name: str) -> T:
    """The value that JSON text describes; a million small objects take some ten seconds.

    Args:
        cls: a dataclass.
        text: the text.
        path: the file it came from, for messages.
        format_name: what its `format` must be.

    Raises:
        FormatError: says where the first problem is and how many more there are.
    """
    return _build(cls, json_tree(text, path=path), path, format_name)


def from_yaml(cls: type[T], text: str, *, path: str, format_name: str) -> T:
    """The value that YAML text describes; arguments and errors as of `from_json`."""
    return _build(cls, yaml_tree(text, path=path), path, format_name)


def read_format(path: str | os.PathLike[str]) -> str:
    """The `format` of a JSON or YAML file; a JSON file that opens with it is not looked at further.

    Raises:
        FormatError: the file cannot be read or has no `format`.
    """
    name, text = os.fspath(path), read_text(path)
    if Path(path).suffix in {".yaml", ".yml"} or not text.lstrip().startswith("{"):
        tree = yaml_tree(text, path=name)
    elif head := _JSON_HEAD.match(text):
        return head[1]
    else:
        tree = json_tree(text, path=name)
    found = tree.get("format") if isinstance(tree, dict) else None
    if not isinstance(found, str):
        raise FormatError(name, "format", 'expected a name under this key, such as "raypipe.plan/1"; check that this is a file of raypipe')
    return found


# Writing


def _plain(value: object, format_name: str) -> dict[str, Any]:
    """The value as a tree."""
    cls: Any = type(value)
    tree: dict[str, Any] = _adapter(cls).dump_python(value, mode="json", by_alias=True, exclude_none=True, warnings="error")
    try:
        json.dumps(tree, allow_nan=False)
    except ValueError:
        place = next(_places_not_finite(tree, ""))
        raise InputError(f"cannot write {format_name}: {place} is infinite or NaN; give it a finite number") from None
    return tree


def _places_not_finite(tree: object, place: str) -> Iterator[str]:
    if isinstance(tree, float) and not math.isfinite(tree):
        yield place
    elif isinstance(tree, dict | list):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _places_not_finite(item, below(place, key))


# Reading


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _validated(cls: Any, tree: object) -> Any:
    # By way of text: only for JSON does pydantic take strict types and yet a list for a tuple.
    return _adapter(cls).validate_json(json.dumps(tree), strict=True, extra="forbid")


def _build(cls: type[T], tree: object, path: str, format_name: str) -> T:
    if not isinstance(tree, dict):
        raise FormatError(
            path, "", f"expected an object with the keys of {format_name}, got {shown(tree)}; check that this is the right file"
        )
    found = tree.pop("format", None)
    if found != format_name:
        problem = f"expected {format_name!r}, got {shown(found)}; check that this is the right file, of this version of raypipe"
        raise FormatError(path, "format", problem)
    try:
        value: T = _validated(cls, tree)
    except ValidationError as error:
        problems = [_Problem.of(detail, tree) for detail in error.errors(include_url=False)]
        raise _first_problem(cls, problems, path) from None
    except RecursionError:
        raise FormatError(path, "", "nested too deeply; check that this is the right file") from None
    return value


@dataclasses.dataclass(frozen=True)
class _Problem:
    """One complaint of pydantic, with its place in the tree.

    Attributes:
        detail: the complaint.
        steps: keys and indices from the top to the place.
        value: those to the value that is wrong; where several types were tried for a value, all their complaints share it.
    """

    detail: ErrorDetails
    steps: tuple[str | int, ...]
    value: tuple[str | int, ...]

    @classmethod
    def of(cls, detail: ErrorDetails, tree: object) -> _Problem:
        """A complaint about a tree."""
        steps: list[str | int] = []
        value = None
        here: Any = tree
        for position, key in enumerate(detail["loc"]):
            if (isinstance(here, dict) and key in here) or (isinstance(here, list) and isinstance(key, int) and key < len(here)):
                here = here[key]  # type: ignore[index]
                steps.append(key)
            elif detail["type"] == "missing" and position == len(detail["loc"]) - 1:
                steps.append(key)
            elif value is None:  # what leads nowhere names a type that was tried
                value = tuple(steps)
        return cls(detail, tuple(steps), tuple(steps) if value is None else value)

    @property
    def is_unknown_key(self) -> bool:
        """Whether a key is there that should not be."""
        return self.detail["type"] in _UNKNOWN_KEY

    @property
    def cause(self) -> object:
        """What `__post_init__` raised, if it is that."""
        return self.detail.get("ctx", {}).get("error")


def _first_problem(cls: type[Any], problems: list[_Problem], path: str) -> FormatError:
    """The error that names the first problem; an unknown key comes first, for it is often why another one is missing."""
    first = min(problems, key=lambda problem: not problem.is_unknown_key)
    # Of several types tried for one value, the complaint that lies deepest is of the type that was meant.
    first = max((p for p in problems if p.value == first.value), key=lambda problem: (len(problem.steps), problem.is_unknown_key))
    more = len({problem.value for problem in problems}) - 1
    where, text = functools.reduce(below, first.steps, ""), _explanation(cls, first)
    if isinstance(first.cause, FormatError):
        where, text = ".".join(filter(None, (where, first.cause.where))), first.cause.problem
    return FormatError(path, where, text + (f" (and {more} more)" if more else ""))


def _explanation(cls: type[Any], problem: _Problem) -> str:
    got = shown(problem.detail["input"])
    match problem.detail["type"]:
        case _ if isinstance(problem.cause, Exception):
            text = str(problem.cause)
        case _ if problem.is_unknown_key:
            known = [key for schema in _schemas_at(cls, problem.steps[:-1]) for key in schema.get("properties", ())]
            keys = f"; the keys here are {', '.join(known)}" if known else "; remove it"
            text = "unknown key" + (suggestion(str(problem.steps[-1]), known) or keys)
        case "missing":
            text = "this key is missing; add it"
        case "json_invalid":
            text = "nested too deeply, or with text that is not valid Unicode; check that this is the right file"
        case "enum" | "literal_error":
            text = f"expected {problem.detail['ctx']['expected']}, got {got}"
        case kind if kind in _EXPECTED:
            text = f"expected {_EXPECTED[kind]}, got {got}"
        case _:
            text = f"{problem.detail['msg']}, got {got}"
    return text


def _schemas_at(cls: Any, steps: tuple[str | int, ...]) -> list[dict[str, Any]]:
    """The JSON schemas of the values that may stand at a place."""
    whole = _adapter(cls).json_schema()

    def variants(schema: Any) -> Iterator[dict[str, Any]]:
        if "$ref" in schema:
            schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            for variant in schema["anyOf"]:
                yield from variants(variant)
        elif isinstance(schema, dict):
            yield schema

    def below_it(schema: dict[str, Any], key: str | int) -> Any:
        if isinstance(key, str):
            return schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
        items = schema.get("prefixItems", ())
        return items[key] if key < len(items) else schema.get("items", {})

    schemas = list(variants(whole))
    for key in steps:
        schemas = [variant for schema in schemas for variant in variants(below_it(schema, key))]
    return schemas
