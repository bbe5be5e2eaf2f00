"""Which combinations of parameters CI runs."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.marks import covering


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_each_value_occurs_in_no_more_cases_than_the_longest_parameter_has_values(sizes: list[int]) -> None:
    cases = [{str(at): value for at, value in enumerate(values)} for values in product(*map(range, sizes))]
    chosen = [cases[position] for position in covering(cases)]
    assert {value for case in chosen for value in case.items()} == {value for case in cases for value in case.items()}
    assert len(chosen) == max(sizes)


def test_two_parameters_do_not_keep_step_where_a_third_needs_more_cases() -> None:
    cases = [dict(zip(("order", "again", "published"), values, strict=True)) for values in product(range(8), (0, 1), (0, 1))]
    chosen = [cases[position] for position in covering(cases)]
    assert Counter((case["again"], case["published"]) for case in chosen) == dict.fromkeys(product((0, 1), (0, 1)), 2)


def test_values_take_turns() -> None:
    cases = [{"size": size, "way": way} for size, way in product(range(6), "ab")]
    ways = Counter(cases[position]["way"] for position in covering(cases))
    assert ways == {"a": 3, "b": 3}
