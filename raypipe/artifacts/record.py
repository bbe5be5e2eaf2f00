"""The dataclasses of files and configuration: frozen, validated by pydantic, refused with a `FormatError`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import field, fields
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from raypipe.artifacts.validation import format_error
from raypipe.errors import FormatError, InputError, shown, unseen

T = TypeVar("T")


def _shown(text: str) -> str:
    if unseen(text) or "\n" in text or "\t" in text:
        raise ValueError(f"expected a name of one line without control characters, got {shown(text)}")
    return text


ShownName = Annotated[str, AfterValidator(_shown)]
"""A name that tables, drawings and messages show."""

_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(*, kw_only: bool = True) -> Callable[[type[T]], type[T]]:
    """Return a decorator for frozen dataclasses whose fields are checked wherever an object is made; files are read strictly (`codec`).

    Limits belong into a field's annotation, whose `json_schema_extra` may hold words for messages: `expected`, `remedy` for numbers beyond
    a limit, and `remedy_above` for those above the upper one alone. `__post_init__` checks several fields together, with `invalid`.
    """

    def decorate(cls: type[T]) -> type[T]:
        _write_nulls(cls)
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


def _write_nulls(cls: type[Any]) -> None:
    # Files leave None out, which reads as a field's default: where that is another value, None must be written.
    optional = [name for name, annotation in inspect.get_annotations(cls).items() if "None" in str(annotation)]
    names = [name for name in optional if getattr(cls, name, None) is not None]
    if not names:
        return

    @model_serializer(mode="wrap")
    def serialize(self: Any, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {**handler(self), **{name: None for name in names if getattr(self, name) is None}}

    cls._serialize_with_nulls = serialize


def invalid(owner: object, where: str, problem: str) -> FormatError:
    """Return the error with which `__post_init__` refuses the field `where`; reading adds path and place."""
    return FormatError(type(owner).__name__, where, problem)
