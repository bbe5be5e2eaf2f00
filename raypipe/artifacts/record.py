"""The dataclasses of files and of the configuration: frozen, validated by pydantic, refused with a `FormatError`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict, ValidationError

from raypipe.artifacts.validation import format_error
from raypipe.errors import FormatError, InputError

T = TypeVar("T")

_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(*, kw_only: bool = True) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class a frozen dataclass whose fields are checked wherever an object is made.

    Python programs may give what converts without loss, such as the text of an enum's member; files are read strictly (`codec`).
    Limits of one field belong into its annotation: `Annotated[float, Field(gt=0)]`. `json_schema_extra` may hold `expected`, words
    for what the field takes, and `remedy`, what to do about another value. `__post_init__` checks what concerns several fields and
    raises `invalid`.
    """

    def decorate(cls: type[T]) -> type[T]:
        made: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=kw_only, config=_CONFIG)
        init = made.__init__

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                init(self, *args, **kwargs)
            except ValidationError as error:
                cause = error.errors()[0].get("ctx", {}).get("error")
                if isinstance(cause, InputError) and not isinstance(cause, FormatError):
                    raise cause from None
                raise format_error(made, error, path=made.__name__, names=[item.name for item in fields(self)]) from None

        made.__init__ = checked
        decorated: type[T] = made
        return decorated

    return decorate


def invalid(owner: object, where: str, problem: str) -> FormatError:
    """Return the error with which `__post_init__` refuses a field; reading a file adds its path and the place of the owner.

    Args:
        owner: Object that is being made.
        where: Field by its name in files, or a place below it, such as `links[2].from`.
        problem: What was expected, what was got and what to do.
    """
    return FormatError(type(owner).__name__, where, problem)
