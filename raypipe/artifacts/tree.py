"""Turns JSON and YAML text into trees of objects, lists and scalars and back, and reads and writes the files.

`codec` is built on it and says what the formats have in common. Whatever the text, the readers here give a tree or one
`FormatError`: bad syntax, repeated keys, numbers that are not finite or do not fit 64 bits and endless nesting are found
here; what the tree must look like is the codec's business.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import yaml

from raypipe.errors import FormatError

_WIDTH = 140
_DEPTH = 50
_WRONG_FILE = "check that this is the right file"
_TOO_DEEP = f"nested too deeply; {_WRONG_FILE}"
_ENCODER = json.JSONEncoder(allow_nan=False)
_WHOLE = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_YAML_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class _BadTextError(ValueError):
    """Text that cannot be used, found where the path is not at hand: the problem and, if known, the place."""

    def __init__(self, problem: str, where: str = "") -> None:
        self.where = where
        super().__init__(problem)


# Files


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        FormatError: there is no such file, it cannot be opened, or it is not UTF-8.
    """
    name = os.fspath(path)
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise FormatError(name, "", "there is no such file; check the path") from None
    except IsADirectoryError:
        raise FormatError(name, "", "this is a directory; name a file in it") from None
    except PermissionError:
        raise FormatError(name, "", "reading it is not permitted; change its permissions or copy it") from None
    except UnicodeDecodeError as error:
        raise FormatError(name, f"byte {error.start}", f"not UTF-8 text; {_WRONG_FILE}") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise FormatError(ascii(name), "", f"cannot be read ({_reason(error)}); check the path") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file as UTF-8, replacing one that is there.

    Raises:
        FormatError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = f"cannot be written ({_reason(error)}); choose a path in a directory that exists and is yours"
        raise FormatError(os.fspath(path), "", problem) from None


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)


# JSON


def json_text(tree: object, *, indent: str = "") -> str:
    """The tree as JSON, broken into lines only where a part is wider than a page; lists of scalars are never broken.

    Raises:
        ValueError: a number is infinite or NaN.
    """
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
    """The tree that JSON text describes.

    Raises:
        FormatError: the text is not JSON, or repeats a key, or a number is out of range.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_without_repeats, parse_float=_number, parse_int=_whole_number, parse_constant=_refuse_constant
        )
    except _BadTextError as error:
        raise FormatError(path, error.where, str(error)) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise FormatError(path, where, f"not JSON: {error.msg}; check that the file is complete and of the right kind") from None
    except RecursionError:
        raise FormatError(path, "", _TOO_DEEP) from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _repeated(next(key for position, key in enumerate(keys) if key in keys[:position]))
    return tree


def _repeated(key: str, where: str = "") -> _BadTextError:
    return _BadTextError(f"an object has the key {shown(key)} twice; remove one of them", where)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadTextError(f"{shorten(text)} is too large for a number; write a smaller one")
    return value


def _whole_number(text: str) -> int:
    # Python turns no more than 4300 digits into a number.
    if len(text) > 40 or not -(2**63) <= int(text) < 2**63:
        raise _BadTextError(f"{shorten(text)} is too large for a whole number of 64 bits; write a smaller one")
    return int(text)


def _refuse_constant(text: str) -> float:
    raise _BadTextError(f"{text} is not a finite number; write one, or leave the key out where it is optional")


# YAML


class _Dumper(yaml.SafeDumper):
    """Quotes text that this module's reader would take for a number, and writes shared objects out each time."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"(?:{_WHOLE.pattern})$"), list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_NUMBER.pattern})$"), list("-+.0123456789"))


def yaml_text(tree: object) -> str:
    """The tree as YAML, its innermost objects and lists on one line each."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=_WIDTH)
    return text


def yaml_tree(text: str, *, path: str) -> object:
    """The tree that YAML text describes: one document without tags, anchors and the surprises of YAML 1.1.

    `3e9` is a number; `no`, `1:30`, `0x10` and `2024-01-01` are text.

    Raises:
        FormatError: the text is none of that, repeats a key, or a number is out of range.
    """
    # Events come from a state machine: unlike with yaml.load, no depth of brackets and no alias exhausts stack or memory.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        events = iter(yaml.parse(text, Loader=loader))
        next(events)  # start of stream
        if isinstance(next(events), yaml.StreamEndEvent):
            raise _BadTextError("the file is empty; check the path")
        tree = _yaml_node(next(events), events, 0)
        next(events)  # end of document
        if not isinstance(event := next(events), yaml.StreamEndEvent):
            raise _BadTextError("a second document begins here; keep one a file", _line(event))
    except _BadTextError as error:
        raise FormatError(path, error.where, str(error)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise FormatError(path, where, f"not YAML: {error.problem or error.context}; check indentation, colons and brackets") from None
    except (yaml.YAMLError, UnicodeError):
        raise FormatError(path, "", f"not YAML: it has characters that no text file holds; {_WRONG_FILE}") from None
    return tree


def _yaml_node(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> object:
    """The node that an event begins; takes the events up to its end."""
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise _BadTextError("anchors and aliases (& and *) are not read; write the value out", _line(event))
    if getattr(event, "tag", None) is not None:
        raise _BadTextError("tags (!) are not read; leave the tag out", _line(event))
    if depth > _DEPTH:
        raise _BadTextError(_TOO_DEEP, _line(event))
    if isinstance(event, yaml.ScalarEvent):
        return _yaml_scalar(event)
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[object] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_yaml_node(event, events, depth + 1))
        return items
    tree: dict[str, object] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
            raise _BadTextError("expected a plain name as key; check indentation and brackets", _line(event))
        if event.value in tree:
            raise _repeated(event.value, _line(event))
        tree[event.value] = _yaml_node(next(events), events, depth + 1)
    return tree


def _yaml_scalar(event: yaml.ScalarEvent) -> object:
    text: str = event.value
    if not event.implicit[0]:  # quoted
        return text
    try:
        if text in _YAML_WORDS:
            return _YAML_WORDS[text]
        if _WHOLE.fullmatch(text):
            return _whole_number(text)
        if _NUMBER.fullmatch(text):
            return _number(text)
        return _refuse_constant(text) if _NOT_FINITE.fullmatch(text) else text
    except _BadTextError as error:
        raise _BadTextError(str(error), _line(event)) from None


def _line(event: yaml.Event) -> str:
    return f"line {event.start_mark.line + 1}" if event.start_mark else ""


# Words for messages


def below(place: str, key: str | int) -> str:
    """The place one key or index below a place: `layers`, `layers[3]`, `layers[3].forward_s`."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    name = shorten(key) if re.fullmatch(r"[\w.\[\]-]+", key, re.ASCII) else shown(key)
    return f"{place}.{name}" if place else name


def shown(value: object) -> str:
    """A value of a tree in few words."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case bool():
            return str(value).lower()
        case _:
            return shorten(ascii(value))


def shorten(text: str) -> str:
    """The text, cut where it is too long for a message."""
    return text if len(text) <= 60 else text[:57] + "..."
