"""Checks trees against dataclasses by pydantic, with one `FormatError`; a field has one type, or that type and None."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from raypipe.errors import FormatError, shorten, shown, suggestion

_UNKNOWN_KEY = {"unexpected_keyword_argument", "extra_forbidden"}
_LIMITS = {
    "greater_than": "> {gt:,.15g}",
    "greater_than_equal": ">= {ge:,.15g}",
    "less_than": "< {lt:,.15g}",
    "less_than_equal": "<= {le:,.15g}",
}
_EXPECTED = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "string_type": "text (quote it where it looks like something else)",
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "tuple_type": "a list",
    "list_type": "a list",
    "unexpected_positional_argument": "arguments by name",
}


@functools.cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """Return pydantic's cached adapter of a dataclass."""
    return TypeAdapter(cls)


def from_tree(cls: Any, tree: object, *, path: str) -> Any:
    """Return the object that a tree describes, or raise `FormatError`."""
    try:
        # By way of text: only for JSON does pydantic take strict types and yet a list for a tuple.
        return adapter(cls).validate_json(json.dumps(tree), strict=True, extra="forbid", by_alias=True, by_name=False)
    except ValidationError as error:
        raise format_error(cls, error, path=path) from None
    except RecursionError:
        raise FormatError(path, "", "nested too deeply; check that this is the right file") from None


def format_error(cls: type[Any], error: ValidationError, *, path: str, names: Sequence[str] = ()) -> FormatError:
    """Return the error for the first problem; unknown keys first, as they often explain missing ones.

    `names` are the fields of `cls` if its arguments were given by position.
    """
    details = error.errors(include_url=False)
    first = min(details, key=lambda detail: detail["type"] not in _UNKNOWN_KEY)
    steps = tuple(names[key] if at == 0 and isinstance(key, int) and key < len(names) else key for at, key in enumerate(first["loc"]))
    where, problem = functools.reduce(_below, steps, ""), _explanation(cls, first, steps)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FormatError):
        where, problem = ".".join(filter(None, (where, cause.where))), cause.problem
    return FormatError(path, where, problem + (f" (and {len(details) - 1} more)" if len(details) > 1 else ""))


def _below(place: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    name = shorten(key) if re.fullmatch(r"[\w.\[\]-]+", key, re.ASCII) else shown(key)
    return f"{place}.{name}" if place else name


def _explanation(cls: type[Any], detail: ErrorDetails, steps: tuple[str | int, ...]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if isinstance(context.get("error"), Exception):
        return str(context["error"])
    if kind in _UNKNOWN_KEY:
        known = [key for schema in _schemas_at(cls, steps[:-1]) for key in schema.get("properties", ())]
        keys = f"; the keys here are {', '.join(known)}" if known else "; remove it"
        return "unknown key" + (suggestion(str(steps[-1]), known) or keys)
    if kind.startswith("missing"):
        return "this key is missing; add it"
    if kind == "json_invalid":
        return "nested too deeply, or with text that is not valid Unicode; check that this is the right file"
    schema: dict[str, Any] = next(iter(_schemas_at(cls, steps)), {})
    if kind in {"enum", "literal_error"}:
        expected = context["expected"]
    elif kind in _LIMITS:
        expected = f"a number {_LIMITS[kind].format(**context)}"
    else:
        expected = _EXPECTED.get(kind) or schema.get("expected")
    return (f"expected {expected}" if expected else detail["msg"]) + f", got {shown(detail['input'])}{_remedy(schema, kind)}"


def _remedy(schema: dict[str, Any], kind: str) -> str:
    # A text or an object in a number's place is another mistake.
    if kind not in {*_LIMITS, "finite_number"}:
        return ""
    remedy = schema.get("remedy") or (schema.get("remedy_above") if kind in {"less_than", "less_than_equal"} else None)
    return f"; {remedy}" if remedy else ""


def _schemas_at(cls: Any, steps: tuple[str | int, ...]) -> list[dict[str, Any]]:
    whole = adapter(cls).json_schema()

    def variants(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "$ref" in schema:
            schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
        for variant in schema.get("anyOf", ()):
            yield from variants(variant)
        if "anyOf" not in schema:
            yield schema

    def item(schema: dict[str, Any], key: str | int) -> Any:
        if isinstance(key, str):
            return schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
        items = schema.get("prefixItems", ())
        return items[key] if key < len(items) else schema.get("items", {})

    schemas = list(variants(whole))
    for key in steps:
        schemas = [variant for schema in schemas for variant in variants(item(schema, key))]
    return schemas
