"""JSON and YAML text to trees and back; `validation` checks what a tree holds.

Refused: bad syntax, control characters, repeated keys, infinite numbers, whole ones beyond 64 bits, endless nesting.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TypeGuard

import yaml

from raypipe.errors import FormatError, shorten, shown, unseen

_WIDTH = 140
_DEPTH = 50
_WRONG_FILE = "check that this is the right file"
_TOO_DEEP = f"nested too deeply; {_WRONG_FILE}"
_ENCODER = json.JSONEncoder(allow_nan=False)
_WHOLE = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_ESCAPED = re.compile(r"\\[bfru]")
"""How JSON writes control characters, among others."""
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_YAML_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class _SyntaxError(ValueError):
    def __init__(self, problem: str, where: str = "") -> None:
        self.where = where
        super().__init__(problem)


# JSON


def json_text(tree: object, *, indent: str = "") -> str:
    """Return the tree as JSON, lines broken only where too wide; raise `ValueError` if a number is infinite or NaN."""
    flat = _ENCODER.encode(tree)
    if len(indent) + len(flat) < _WIDTH or not _has_parts(tree):
        return flat
    deeper = indent + " "
    if isinstance(tree, dict):
        parts = [f"{_ENCODER.encode(key)}: {json_text(item, indent=deeper)}" for key, item in tree.items()]
    else:
        parts = [json_text(item, indent=deeper) for item in tree]
    first, last = "{}" if isinstance(tree, dict) else "[]"
    return f"{first}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{last}"


def _has_parts(tree: object) -> TypeGuard[dict[str, object] | list[object]]:
    return isinstance(tree, dict) or (isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree))


def json_tree(text: str, *, path: str) -> object:
    """Return the tree in JSON text, or raise `FormatError`."""
    try:
        tree = json.loads(text, object_pairs_hook=_object, parse_float=_number, parse_int=_whole_number, parse_constant=_refuse_constant)
        if _ESCAPED.search(text) or unseen(text):
            _refuse_unseen(tree)
        return tree
    except _SyntaxError as error:
        raise FormatError(path, error.where, str(error)) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise FormatError(path, where, f"not JSON: {error.msg}; check that the file is complete and of the right kind") from None
    except RecursionError:
        raise FormatError(path, "", _TOO_DEEP) from None


def _refuse_unseen(tree: object, where: str = "") -> None:
    if isinstance(tree, str):
        if (found := unseen(tree)) is not None:
            raise _SyntaxError(f"text holds the control character {found[0]!a}, which a terminal would obey; remove it", where)
    elif isinstance(tree, list):
        for position, item in enumerate(tree):
            _refuse_unseen(item, f"{where}[{position}]")
    elif isinstance(tree, dict):
        for key, item in tree.items():
            _refuse_unseen(key, where)
            _refuse_unseen(item, f"{where}.{key}" if where else key)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _repeated(next(key for position, key in enumerate(keys) if key in keys[:position]))
    return tree


def _repeated(key: str, where: str = "") -> _SyntaxError:
    return _SyntaxError(f"an object has the key {shown(key)} twice; remove one of them", where)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _SyntaxError(f"{shorten(text)} is too large for a number; write a smaller one")
    return value


def _whole_number(text: str) -> int:
    # Python turns no more than 4300 digits into a number.
    if len(text) > 40 or not -(2**63) <= int(text) < 2**63:
        raise _SyntaxError(f"{shorten(text)} is too large for a whole number of 64 bits; write a smaller one")
    return int(text)


def _refuse_constant(text: str) -> float:
    raise _SyntaxError(f"{text} is not a finite number; write one, or leave the key out where it is optional")


# YAML


class _Dumper(yaml.SafeDumper):
    """Quotes text that this module's reader would take for a number, and repeats shared objects."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"(?:{_WHOLE.pattern})$"), list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_NUMBER.pattern})$"), list("-+.0123456789"))


def yaml_text(tree: object) -> str:
    """Return the tree as YAML, innermost objects and lists on one line each."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=_WIDTH)
    return text


def yaml_tree(text: str, *, path: str) -> object:
    """Return the tree in YAML text, or raise `FormatError`: one document; `no`, `1:30`, `0x10` are text."""
    # Libyaml's events: a topology of 1,000 nodes loads in 0.3 s, by yaml.load in 1.2 s, by ruamel.yaml in 7 s. Neither of these
    # refuses aliases, and deep brackets exhaust the stack of yaml.load.
    try:
        events = iter(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        next(events)  # start of the stream
        if isinstance(next(events), yaml.StreamEndEvent):
            raise _SyntaxError("the file is empty; check the path")
        tree = _node(next(events), events, 0)
        next(events)  # end of the document
        if not isinstance(event := next(events), yaml.StreamEndEvent):
            raise _SyntaxError("a second document begins here; keep one a file", _line(event))
    except _SyntaxError as error:
        raise FormatError(path, error.where, str(error)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise FormatError(path, where, f"not YAML: {error.problem or error.context}; check indentation, colons and brackets") from None
    except (yaml.YAMLError, UnicodeError):
        raise FormatError(path, "", f"not YAML: it has characters that no text file holds; {_WRONG_FILE}") from None
    return tree


def _node(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> object:
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise _SyntaxError("anchors and aliases (& and *) are not read; write the value out", _line(event))
    if getattr(event, "tag", None) is not None:
        raise _SyntaxError("tags (!) are not read; leave the tag out", _line(event))
    if depth > _DEPTH:
        raise _SyntaxError(_TOO_DEEP, _line(event))
    if isinstance(event, yaml.ScalarEvent):
        _refuse_unseen(event.value, _line(event))
        return _scalar(event) if event.implicit[0] else event.value  # quoted text stays text
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[object] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_node(event, events, depth + 1))
        return items
    tree: dict[str, object] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
            raise _SyntaxError("expected a plain name as key; check indentation and brackets", _line(event))
        _refuse_unseen(event.value, _line(event))
        if event.value in tree:
            raise _repeated(event.value, _line(event))
        tree[event.value] = _node(next(events), events, depth + 1)
    return tree


def _scalar(event: yaml.ScalarEvent) -> object:
    text: str = event.value
    try:
        if text in _YAML_WORDS:
            return _YAML_WORDS[text]
        if _WHOLE.fullmatch(text):
            return _whole_number(text)
        if _NUMBER.fullmatch(text):
            return _number(text)
        return _refuse_constant(text) if _NOT_FINITE.fullmatch(text) else text
    except _SyntaxError as error:
        raise _SyntaxError(str(error), _line(event)) from None


def _line(event: yaml.Event) -> str:
    return f"line {event.start_mark.line + 1}" if event.start_mark else ""
