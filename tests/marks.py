"""Which cases of parametrized tests are slow: `make test-all` runs them, CI does not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from enum import Enum
from itertools import combinations
from typing import Any

import pytest

COMBINED = "combined"
"""The mark of a test of whose combinations CI runs only as many as have each value of each parameter."""


def slow_unless(kept: Collection[Any], cases: Sequence[Any]) -> list[Any]:
    """Return all cases; those that are not kept are slow."""
    assert set(kept) <= set(cases), "what is kept is a case"
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases
    ]


def covering(cases: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """Return positions of a few cases that have each value of each parameter.

    The next case is always one with most values that none has yet; of these, the one whose values few have, then the one whose pairs of
    values few have. So of seven sizes and two ways to run, the sizes take turns with the ways.
    """
    used: Counter[object] = Counter()
    left = list(range(len(cases)))
    chosen: set[int] = set()
    while left:
        best = min(left, key=lambda position: _rank(used, cases[position]))
        if all(used[value] for value in cases[best].items()):
            break
        used.update(cases[best].items())
        used.update(combinations(sorted(cases[best].items(), key=_name), 2))
        chosen.add(best)
        left.remove(best)
    return chosen


def _rank(used: Counter[object], case: Mapping[str, Hashable]) -> tuple[int, int, int]:
    values = sorted(case.items(), key=_name)
    unseen = sum(not used[value] for value in values)
    return -unseen, sum(used[value] for value in values), sum(used[pair] for pair in combinations(values, 2))


def _name(value: tuple[str, Hashable]) -> str:
    return value[0]


def mark_slow_combinations(items: Sequence[pytest.Item]) -> None:
    """Mark the combinations that CI leaves out. Cases that are slow already stand for no value.

    Which cases those are depends on what was collected, and on its order alone.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker(COMBINED) and not item.get_closest_marker("slow"):
            if not hasattr(item, "callspec"):
                raise pytest.UsageError(f"{item.nodeid} is marked {COMBINED!r} but has no parameters: remove the mark")
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        kept = covering([_values(item) for item in of_test])
        for position, item in enumerate(of_test):
            if position not in kept:
                item.add_marker(pytest.mark.slow)


def _values(item: Any) -> dict[str, Hashable]:
    """What a test is called with: the values of each `parametrize` are one, as they were written together.

    All cases of a test have the same objects: what is neither text nor number counts by identity.
    """
    given = {name: value if isinstance(value, str | int | float | Enum) else id(value) for name, value in item.callspec.params.items()}
    found: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        found[" ".join(names)] = tuple(given[name] for name in names)
    return found
