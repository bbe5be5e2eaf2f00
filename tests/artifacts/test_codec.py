"""The codec gives back what it wrote, and one FormatError for everything else."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, NonNegativeFloat

from raypipe.artifacts import codec
from raypipe.artifacts.files import read_text, write_text
from raypipe.artifacts.record import record
from raypipe.errors import FormatError, InputError, unseen

FORMAT = "raypipe.zoo/1"


class Diet(StrEnum):
    PLANTS = "plants"
    FISH = "fish"


class Spot(NamedTuple):
    row: int
    column: int


@record(kw_only=False)
class Animal:
    name: str
    weight_kg: NonNegativeFloat
    legs: int = 4
    diet: Diet = Diet.PLANTS
    chip: str | None = None
    tame: bool = False

    def __post_init__(self) -> None:
        if self.legs > 8:
            raise ValueError(f"{self.legs} legs are too many")


@record(kw_only=False)
class Road:
    source: Annotated[str, Field(alias="from")]
    to: str


@dataclass(frozen=True)
class Zoo:
    """A dataclass that says nothing about unknown keys: the codec must refuse them all the same."""

    name: str
    animals: tuple[Animal, ...]
    cages: dict[str, tuple[Animal, ...]] = field(default_factory=dict)
    roads: tuple[Road, ...] = ()
    spots: tuple[Spot, ...] = ()
    area_m2: float | None = None


LION = Animal("lion", 190.5, diet=Diet.FISH, chip="0042")
ZOO = Zoo("z", (LION, Animal("ant", 1e-6, legs=6)), {"a b": (LION,)}, (Road("gate", "cage"),), (Spot(1, 2),), 3.0)

# Files do not hold what a terminal would obey.
texts = st.text().filter(lambda text: unseen(text) is None)

animals = st.builds(
    Animal,
    name=texts,
    weight_kg=st.floats(0, allow_nan=False, allow_infinity=False),
    legs=st.integers(-(2**63), 8),
    diet=st.sampled_from(Diet),
    chip=st.none() | texts | st.sampled_from(["null", "1:30", "3e9", ".inf", "no", "~", "0x1", "007", "1_0", "2024-01-01", "- a", "# b"]),
    tame=st.booleans(),
)
zoos = st.builds(
    Zoo,
    name=texts,
    animals=st.lists(animals, max_size=3).map(tuple),
    cages=st.dictionaries(texts, st.lists(animals, max_size=2).map(tuple), max_size=2),
    roads=st.lists(st.builds(Road, texts, texts), max_size=2).map(tuple),
    spots=st.lists(st.builds(Spot, st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple),
    area_m2=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


def read_json(text: str) -> Zoo:
    return codec.from_json(Zoo, text, path="zoo.json", format_name=FORMAT)


def read_yaml(text: str) -> Zoo:
    return codec.from_yaml(Zoo, text, path="zoo.yaml", format_name=FORMAT)


def tree() -> Any:
    return json.loads(codec.to_json(ZOO, format_name=FORMAT))


def refusal(text: str, read: Callable[[str], object] = read_json) -> FormatError:
    with pytest.raises(FormatError) as caught:
        read(text)
    return caught.value


@given(zoos)
def test_json_gives_back_what_was_written(zoo: Zoo) -> None:
    assert read_json(codec.to_json(zoo, format_name=FORMAT)) == zoo


@given(zoos)
def test_yaml_gives_back_what_was_written(zoo: Zoo) -> None:
    assert read_yaml(codec.to_yaml(zoo, format_name=FORMAT)) == zoo


@given(st.text() | st.recursive(st.sampled_from("[{:,}]&*!|>-?'\"\n 0aN.e~#%@"), lambda part: st.lists(part).map("".join)))
def test_any_text_gives_one_format_error(text: str) -> None:
    refusal(text, read_json)
    refusal(text, read_yaml)


@given(st.binary())
def test_any_bytes_give_one_format_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for name in ("zoo.json", "zoo.yaml"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(content)
        with pytest.raises(FormatError):
            read_json(read_text(path))
        with pytest.raises(FormatError):
            codec.read_format(path)


@pytest.mark.parametrize(("write", "read"), [(codec.to_json, read_json), (codec.to_yaml, read_yaml)])
@given(data=st.data())
def test_damaged_text_is_read_or_refused_with_one_format_error(
    write: Callable[..., str], read: Callable[[str], Zoo], data: st.DataObject
) -> None:
    text = write(ZOO, format_name=FORMAT)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 40, len(text))))
    insert = data.draw(
        st.text(max_size=3) | st.sampled_from(["NaN", "1e999", "[[", "null", '"', "\ud800", "\\ud800", "&a ", "*a", "!!x ", text[:40]])
    )
    with contextlib.suppress(FormatError):
        read(text[:start] + insert + text[end:])


@given(st.data())
def test_a_value_of_another_type_is_read_or_refused_with_one_format_error(data: st.DataObject) -> None:
    content = here = tree()
    key = data.draw(st.sampled_from(sorted(here)))
    while isinstance(here[key], dict | list) and here[key] and data.draw(st.booleans()):
        here = here[key]
        key = data.draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
    here[key] = data.draw(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([]) | st.just({}) | st.just([[{}]]))
    for read in (read_json, read_yaml):
        with contextlib.suppress(FormatError):
            read(json.dumps(content))


def test_format_comes_first_and_absent_values_are_left_out() -> None:
    zoo = Zoo("z", ())
    assert codec.to_json(zoo, format_name=FORMAT).startswith('{"format": "raypipe.zoo/1", "name": "z"')
    assert codec.to_yaml(zoo, format_name=FORMAT).startswith("format: raypipe.zoo/1\nname: z\n")
    assert "area_m2" not in codec.to_json(zoo, format_name=FORMAT)


def test_json_has_a_line_for_each_part_and_keeps_long_lists_of_numbers_on_one() -> None:
    lines = codec.to_json(Zoo("z", (LION,) * 3), format_name=FORMAT).splitlines()
    assert sum('"lion"' in line for line in lines) == 3

    @dataclass(frozen=True)
    class Columns:
        values: list[int]

    assert len(codec.to_json(Columns(list(range(1000))), format_name=FORMAT).splitlines()) == 4


@pytest.mark.parametrize("write", [codec.to_json, codec.to_yaml])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_are_not_written(write: Callable[..., str], number: float) -> None:
    zoo = Zoo("z", (), cages={"a": ()}, area_m2=number)
    with pytest.raises(InputError, match=r"raypipe\.zoo/1: a number in it is infinite or NaN"):
        write(zoo, format_name=FORMAT)


def test_digests_are_equal_for_equal_content_only() -> None:
    whole = codec.digest(Zoo("z", (Animal("a", 1),)), format_name=FORMAT)
    assert whole == codec.digest(Zoo("z", (Animal("a", 1.0),)), format_name=FORMAT)
    assert whole != codec.digest(Zoo("z", (Animal("a", 1.5),)), format_name=FORMAT)
    assert whole != codec.digest(Zoo("z", (Animal("a", 1.0),)), format_name="raypipe.zoo/2")
    assert len(whole) == 16


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    one, two = Zoo("z", (), cages={"a": (), "b": ()}), Zoo("z", (), cages={"b": (), "a": ()})
    assert codec.digest(one, format_name=FORMAT) == codec.digest(two, format_name=FORMAT)


def change(*steps: str | int, to: object) -> str:
    content = here = tree()
    for step in steps[:-1]:
        here = here[step]
    here[steps[-1]] = to
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        (change("animals", 1, "weight_kg", to="3"), "animals[1].weight_kg", "expected a number, got '3'"),
        (change("animals", 1, "weight_kg", to=True), "animals[1].weight_kg", "expected a number, got true"),
        (change("animals", 1, "weight_kg", to=None), "animals[1].weight_kg", "expected a number, got nothing"),
        (change("animals", 1, "weight_kg", to=-1), "animals[1].weight_kg", "expected a number >= 0, got -1"),
        (change("animals", 1, "legs", to=9), "animals[1]", "9 legs are too many"),
        (change("animals", 1, "legs", to=4.0), "animals[1].legs", "expected a whole number, got 4.0"),
        (change("animals", 1, "legs", to=True), "animals[1].legs", "expected a whole number, got true"),
        (change("animals", 1, "name", to=3), "animals[1].name", "expected text (quote it where it looks like something else), got 3"),
        (change("animals", 1, "tame", to=1), "animals[1].tame", "expected true or false, got 1"),
        (change("animals", 1, "diet", to="cake"), "animals[1].diet", "expected 'plants' or 'fish', got 'cake'"),
        (change("animals", 1, to=[1, 2]), "animals[1]", "expected an object, got a list of 2"),
        (change("animals", to={}), "animals", "expected a list, got an object"),
        (change("cages", to=[]), "cages", "expected an object, got a list of 0"),
        (change("cages", "a b", 0, "legs", to=9), "cages.'a b'[0]", "9 legs are too many"),
        (change("cages", to={"b": [{"name": "b"}]}), "cages.b[0].weight_kg", "this key is missing; add it"),
        (change("animals", 1, "legz", to=4), "animals[1].legz", "unknown key; did you mean 'legs'?"),
        (change("roads", 0, "source", to="x"), "roads[0].source", "unknown key; the keys here are from, to"),
        (change("zzz", to=1), "zzz", "unknown key; the keys here are name, animals, cages, roads, spots, area_m2"),
        (change("spots", 0, to={"row": 1, "colum": 2}), "spots[0].colum", "unknown key; remove it (and 1 more)"),
        (change("spots", 0, to=[1]), "spots[0][1]", "this key is missing; add it"),
        (change("spots", 0, to=[1, 2, 3]), "spots[0]", "NamedTuple should have at most 2 items after validation, not 3, got a list of 3"),
        (
            change("animals", to=[{"name": "a", "wieght_kg": 1}]),
            "animals[0].wieght_kg",
            "unknown key; did you mean 'weight_kg'? (and 1 more)",
        ),
        (change("animals", to=[3, 4, 5]), "animals[0]", "expected an object, got 3 (and 2 more)"),
        (change("format", to="raypipe.zoo/2"), "format", "expected 'raypipe.zoo/1', got 'raypipe.zoo/2'; check that this"),
        (change("format", to=None), "format", "expected 'raypipe.zoo/1', got nothing; check that this"),
        (change("name", to="x" * 9999).replace('"name"', '"nam"', 1), "nam", "unknown key; did you mean 'name'? (and 1 more)"),
        ("{}", "format", "expected 'raypipe.zoo/1', got nothing; check that this"),
        ("[]", "", "expected an object with the keys of raypipe.zoo/1, got a list of 0"),
        ("3", "", "expected an object with the keys of raypipe.zoo/1, got 3"),
    ],
)
@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_a_refusal_names_the_place_and_the_problem(read: Callable[[str], Zoo], text: str, where: str, problem: str) -> None:
    error = refusal(text, read)
    assert error.where == where
    assert error.problem.startswith(problem)


@pytest.mark.parametrize(
    ("values", "where", "problem"),
    [
        ({"name": "a", "weight_kg": -1}, "weight_kg", "expected a number >= 0, got -1"),
        ({"name": "a", "weight_kg": math.nan}, "weight_kg", "expected a finite number, got nan"),
        ({"name": "a", "weight_kg": 1, "legs": 9}, "", "9 legs are too many"),
        ({"name": "a", "wieght_kg": 1}, "wieght_kg", "unknown key; did you mean 'weight_kg'? (and 1 more)"),
        ({"name": "a"}, "weight_kg", "this key is missing; add it"),
    ],
)
def test_an_object_that_a_program_makes_is_checked_and_refused_by_the_name_of_its_class(
    values: dict[str, Any], where: str, problem: str
) -> None:
    with pytest.raises(FormatError) as caught:
        Animal(**values)
    assert (caught.value.path, caught.value.where, caught.value.problem) == ("Animal", where, problem)


def test_values_by_position_are_named_too_and_what_converts_is_taken() -> None:
    with pytest.raises(FormatError, match=r"^Animal: weight_kg: expected a number >= 0"):
        Animal("a", -1)
    animal = Animal("a", 1, diet="fish")  # type: ignore[arg-type]  # as a program without types may write it
    assert animal.diet is Diet.FISH


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ('{"format": "raypipe.zoo/1"', "line 1, column 27", "not JSON: Expecting ',' delimiter"),
        ("", "line 1, column 1", "not JSON: Expecting value"),
        ('{"name": {"a": 1, "b": 2, "a": 1}}', "", "an object has the key 'a' twice; remove one of them"),
        ('{"format": "a", "format": "a"}', "", "an object has the key 'format' twice"),
        (change("name", to="\ud800"), "", "nested too deeply, or with text that is not valid Unicode"),
        ('{"a": NaN}', "", "NaN is not a finite number"),
        ('{"a": -Infinity}', "", "-Infinity is not a finite number"),
        ('{"a": 1e999}', "", "1e999 is too large for a number"),
        ('{"a": 9223372036854775808}', "", "9223372036854775808 is too large for a whole number of 64 bits"),
        ('{"a": ' + "9" * 9999 + "}", "", "9" * 57 + "... is too large"),
        ("[" * 100_000, "", "nested too deeply"),
        ('{"a":' * 100_000, "", "nested too deeply"),
        ('{"format": "raypipe.zoo/1", "name": ' + "[" * 400 + "]" * 400 + "}", "", "nested too deeply"),
    ],
)
def test_json_that_is_none_is_refused(text: str, where: str, problem: str) -> None:
    error = refusal(text)
    assert error.where == where
    assert error.problem.startswith(problem)


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("", "", "the file is empty"),
        ("# nothing\n", "", "the file is empty"),
        ("a: [1", "line ", "not YAML: "),
        ("a: b: c", "line 1, column 5", "not YAML: mapping values are not allowed"),
        ("a: 1\n---\nb: 2\n", "line 2", "a second document begins here"),
        ("a: &x 1\nb: *x\n", "line 1", "anchors and aliases"),
        ("a: *x\n", "line 1", "anchors and aliases"),
        ("&x a: 1\n", "line 1", "expected a plain name as key"),
        ("a: 1\n!!str b: 1\n", "line 2", "expected a plain name as key"),
        ("? [a]\n: 1\n", "line 1", "expected a plain name as key"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1", "tags"),
        ("a: !!float 3\n", "line 1", "tags"),
        ("a: ! 3\n", "line 1", "tags"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4", "an object has the key 'c' twice"),
        ("a: .inf", "line 1", ".inf is not a finite number"),
        ("a: .nan", "line 1", ".nan is not a finite number"),
        ("\na: 1e999", "line 2", "1e999 is too large"),
        ("a: " + "9" * 9999, "line 1", "9" * 57 + "... is too large"),
        ("a: " + "[" * 100_000, "line 1", "nested too deeply"),
        ("- " * 400 + "a", "line 1", "nested too deeply"),
        ("a: \x00", "", "not YAML: it has characters"),
        ("a: \ud800", "", "not YAML: it has characters"),
    ],
)
def test_yaml_that_is_none_is_refused(text: str, where: str, problem: str) -> None:
    error = refusal(text, read_yaml)
    assert error.where.startswith(where)
    assert error.problem.startswith(problem)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [("3e9", 3e9), ("100e-6", 1e-4), (".5", 0.5), ("7.", 7.0), ("+7", 7.0), ("010", 10.0), ("null", None), ("", None), ("~", None)],
)
def test_yaml_numbers_need_no_point_and_no_sign(scalar: str, value: float | None) -> None:
    assert read_yaml(f"format: raypipe.zoo/1\nname: z\nanimals: []\narea_m2: {scalar}\n").area_m2 == value


@pytest.mark.parametrize("scalar", ["no", "on", "y", "1:30", "0x10", "1_000", "2024-01-01", "=", "<<", "'3'", '"true"'])
def test_yaml_words_that_only_yaml_1_1_turns_into_something_else_are_text(scalar: str) -> None:
    assert read_yaml(f"format: raypipe.zoo/1\nname: {scalar}\nanimals: []\n").name == scalar.strip("'\"")


def test_reading_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    for name, problem in [
        ("missing.json", "there is no such file"),
        (".", "this is a directory"),
        ("latin.json", "byte 10: not UTF-8 text"),
        ("a\0b", "cannot be read"),
        ("a" * 999, "cannot be read"),
    ]:
        with pytest.raises(FormatError, match=problem):
            read_text(tmp_path / name)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> IO[bytes]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # root, who runs tests in containers, may read everything
    with pytest.raises(FormatError, match="not permitted"):
        read_text(tmp_path / "zoo.json")


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "zoo.json").write_text(codec.to_json(ZOO, format_name=FORMAT), encoding="utf-8-sig")
    assert read_json(read_text(tmp_path / "zoo.json")) == ZOO


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be written"):
        write_text(tmp_path / "no" / "such" / "directory", "text")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("zoo.json", '{"format": "raypipe.zoo/1", "name": '),  # not read to its end
        ("zoo.json", '{"name": "z", "format": "raypipe.zoo/1"}'),
        ("zoo", '{"name": "z", "format": "raypipe.zoo/1"}'),
        ("zoo", "name: z\nformat: raypipe.zoo/1\n"),
        ("zoo.yaml", "name: z\nformat: raypipe.zoo/1\n"),
        ("zoo.yml", "{name: z, format: raypipe.zoo/1}"),
    ],
)
def test_the_format_of_a_file_is_found_wherever_it_stands(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert codec.read_format(tmp_path / name) == "raypipe.zoo/1"


@pytest.mark.parametrize("text", ['{"name": "z"}', '{"format": 3}', "- a", "name: z", "format: [a]", "plain words"])
def test_a_file_without_a_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "zoo").write_text(text)
    with pytest.raises(FormatError, match="expected a name under this key"):
        codec.read_format(tmp_path / "zoo")


@pytest.mark.parametrize("text", [codec.to_yaml(ZOO, format_name=FORMAT), "a: [1", "a: *x", "- " * 400 + "a", "a: \x00", "a: \ud800"])
def test_yaml_is_read_alike_without_the_c_library(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    if text.startswith("format"):
        assert read_yaml(text) == ZOO
    else:
        refusal(text, read_yaml)


def test_many_small_objects_are_read_in_reasonable_time() -> None:
    # 20,000 objects and 20,000 complaints; quadratic work in either would exceed the timeout of a test.
    text = codec.to_json(Zoo("z", (LION,) * 20_000), format_name=FORMAT)
    assert len(read_json(text).animals) == 20_000
    assert refusal(text.replace('"legs"', '"legz"')).problem.endswith("(and 19999 more)")
