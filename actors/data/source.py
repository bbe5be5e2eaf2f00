"""What a run reads its rows from: objects or functions of the user, for training and for evaluation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle
from torch.utils.data import DataLoader, IterableDataset

from raypipe.actors.data.collate import Collate, stack_rows
from raypipe.actors.data.seeds import seed_all
from raypipe.actors.data.streams import Position, RowStream
from raypipe.actors.data.tables import Columns, RowTable
from raypipe.config import DataConfig
from raypipe.data.samples import Split
from raypipe.errors import ConfigError, RaypipeError
from raypipe.user_code import named, recorded_name

RowSource = RowTable | RowStream
_KINDS = (
    "a table with __len__ and __getitem__ (a torch or Hugging Face dataset, a list), a dict of columns, or something that can be iterated "
    "(an IterableDataset, a DataLoader, a Ray Dataset)"
)


@dataclass(frozen=True)
class DataSource:
    """The user's data by split; small enough to be sent where it is read, or a function that opens it there.

    Attributes:
        data: For each split the data, a function that returns it, or the function's name, `module:function`.
        collate: Makes fields from a list of rows, or its name; `None` to stack fields of one shape.
        options: Keyword arguments of functions by name.
        seed: Orders and seeds the rows.
        directory: Where relative paths of the user's files start.
    """

    data: Mapping[str, Any]
    collate: Collate | str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    directory: str = field(default_factory=os.getcwd)

    @classmethod
    def of(cls, config: DataConfig, *, seed: int) -> DataSource:
        """Return the source of a configuration that names functions."""
        data = {split.value: name for split, name in ((Split.TRAIN, config.train), (Split.VALIDATION, config.eval)) if name}
        return cls(data, collate=config.collate or None, options=config.options, seed=seed)

    def packed(self) -> bytes:
        """Return the source as bytes for another process.

        Raises:
            ConfigError: It cannot be sent.
        """
        try:
            content: bytes = cloudpickle.dumps(self)
        except Exception as error:  # whatever the user's objects raise
            raise ConfigError(
                f"the training data cannot be sent to the processes that read it ({type(error).__name__}: {error}); give a function that "
                "opens it, such as train_data=open_rows"
            ) from error
        return content

    def collator(self) -> Collate:
        """Return what makes fields from rows."""
        if not isinstance(self.collate, str):
            return self.collate or stack_rows
        function = named(self.collate, what="data.collate", such_as="my_data.py:collate")
        if not callable(function):
            raise ConfigError(f"data.collate {self.collate!r}: expected a function, got {type(function).__name__}")
        return function

    def open(self, split: str, *, mark_every: int = 1, start: Position | None = None) -> RowSource:
        """Return the rows of a split.

        Raises:
            ConfigError: A function fails, or returns no data.
        """
        open_data = self._opener(split)
        data = open_data()
        if is_table(data):
            return RowTable(Columns(data) if isinstance(data, Mapping) else data, seed=self.seed, split=split)
        opened = [data]
        dataset: Any = data.dataset if isinstance(data, DataLoader) else None
        num_rows = len(dataset) if is_table(dataset) else None
        return RowStream(
            lambda: opened.pop() if opened else open_data(), seed=self.seed, mark_every=mark_every, start=start, num_rows=num_rows
        )

    def _opener(self, split: str) -> Callable[[], Any]:
        what, data = _KEYS[split], self.data[split]
        options: Mapping[str, Any] = {}
        if isinstance(data, str):
            options = self.options
            data = named(data, what=f"data.{what}", such_as="my_data.py:rows")
        is_function = isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__"))
        if not is_function:
            return lambda: checked(data, what=what)

        def opened() -> Any:
            seed_all(self.seed)  # a loader may draw the seed of its order when it is made
            try:
                found = data(**options)
            except RaypipeError:
                raise
            except Exception as error:
                given = ", ".join(f"{key}={value!r}" for key, value in options.items())
                raise ConfigError(f"the function of data.{what}, called with ({given}), failed: {type(error).__name__}: {error}") from error
            return checked(found, what=what)

        return opened


_KEYS: Mapping[str, str] = {Split.TRAIN: "train", Split.VALIDATION: "eval"}


def is_table(data: Any) -> bool:
    """Return whether data has a place for each row."""
    if isinstance(data, IterableDataset | DataLoader) or is_ray_dataset(data):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def is_ray_dataset(data: Any) -> bool:
    """Return whether data is a Dataset of Ray Data; does not load Ray Data."""
    module = sys.modules.get("ray.data")
    return module is not None and isinstance(data, module.Dataset)


def data_name(data: object) -> str:
    """Return the name of the user's data or function, as a configuration records it; empty for `None`."""
    return "" if data is None else recorded_name(data)  # type: ignore[arg-type]


def _is_split(value: Any) -> bool:
    return hasattr(value, "column_names") or (is_table(value) and len(value) > 0 and isinstance(value[0], Mapping))


def checked(data: Any, *, what: str) -> Any:
    """Return data that rows can be read from.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(data, str | bytes) or not (is_table(data) or hasattr(data, "__iter__") or is_ray_dataset(data)):
        raise ConfigError(f"data.{what} is of type {type(data).__name__}; expected {_KINDS}")
    if isinstance(data, Mapping) and data and any(_is_split(value) for value in data.values()):
        raise ConfigError(
            f"data.{what} is a dict of lists of rows, with the splits {', '.join(map(str, data))}; give one of them, such as "
            f"data[{next(iter(data))!r}]"
        )
    if is_ray_dataset(data):
        data.context.execution_options.preserve_order = True  # the order of rows would depend on which tasks end first
    return data
