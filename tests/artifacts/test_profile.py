"""A model profile is read as it was written, and refused where it cannot be true."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts import codec
from raypipe.artifacts.profile import FORMAT, LayerProfile, LayerTimes, ModelProfile, NamedEdge
from raypipe.errors import FormatError
from tests.strategies import SHOWN

TWO_TOWERS = """{
 "format": "raypipe.model_profile/1", "name": "two-towers", "microbatch_size": 8,
 "layers": [
  {"name": "text", "forward_s": 0.1, "backward_s": 0.2, "weight_grad_s": 0.1, "output_bytes": 10, "saved_bytes": 20,
   "parameter_bytes": 40, "weight_grad_saved_bytes": 5, "tied": "words", "gradient_rows": 128, "branch": "text"},
  {"name": "image", "forward_s": 1, "backward_s": 2, "weight_grad_s": 0, "output_bytes": 30, "saved_bytes": 0, "parameter_bytes": 0},
  {"name": "loss", "forward_s": 0.0, "backward_s": 0.0, "weight_grad_s": 0.0, "output_bytes": 0, "saved_bytes": 0, "parameter_bytes": 0}
 ],
 "edges": [{"from": "text", "to": "loss"}, {"from": "image", "to": "loss", "bytes": 7}],
 "device_kinds": {"h200": [
  {"forward_s": 0.01, "backward_s": 0.02, "weight_grad_s": 0.01},
  {"forward_s": 0.01, "backward_s": 0.02, "weight_grad_s": 0.01},
  {"forward_s": 0.01, "backward_s": 0.02, "weight_grad_s": 0.01}
 ]}
}"""

amounts = st.integers(0, 2**63 - 1)


@st.composite
def times(draw: st.DrawFn) -> dict[str, Any]:
    backward_s = draw(st.floats(0, 1e6))
    return {"forward_s": draw(st.floats(0, 1e6)), "backward_s": backward_s, "weight_grad_s": draw(st.floats(0, backward_s))}


@st.composite
def layer_profiles(draw: st.DrawFn, name: str) -> LayerProfile:
    parameter_bytes = draw(amounts)
    frozen_bytes = draw(st.none() | st.integers(0, parameter_bytes))
    looked_up_rows = draw(st.none() | st.integers(1, 2**63 - 1))
    return LayerProfile(
        name=name,
        output_bytes=draw(amounts),
        saved_bytes=draw(amounts),
        parameter_bytes=parameter_bytes,
        weight_grad_saved_bytes=draw(st.none() | amounts),
        tied=draw(st.none() | SHOWN),
        tied_bytes=draw(st.none() | st.integers(0, parameter_bytes)),
        gradient_rows=draw(st.none() | st.integers(0, looked_up_rows or 2**63 - 1)),
        looked_up_rows=looked_up_rows,
        looked_up_bytes=draw(st.none() | st.integers(0, parameter_bytes - (frozen_bytes or 0))),
        reread_share=draw(st.none() | st.floats(0, 1)),
        low_precision_bytes=draw(st.none() | amounts),
        frozen_bytes=frozen_bytes,
        working_bytes=draw(st.none() | amounts),
        input_grad_working_bytes=draw(st.none() | amounts),
        branch=draw(st.none() | SHOWN.filter(bool)),
        **draw(times()),
    )


@st.composite
def model_profiles(draw: st.DrawFn) -> ModelProfile:
    names = draw(st.lists(SHOWN.filter(bool), min_size=1, max_size=4, unique=True))
    forward_pairs = [(a, b) for index, a in enumerate(names) for b in names[index + 1 :]]
    pairs = draw(st.lists(st.sampled_from(forward_pairs), unique=True)) if forward_pairs else []
    pairs += [(name, names[-1]) for name in names[:-1] if name not in dict(pairs)]  # branches meet
    edges = tuple(NamedEdge(producer=a, consumer=b, bytes=draw(st.none() | amounts)) for a, b in pairs)
    layer_times = st.builds(lambda values: LayerTimes(**values), times())
    kinds = st.dictionaries(SHOWN, st.tuples(*[layer_times] * len(names)), max_size=2)
    return ModelProfile(
        name=draw(SHOWN),
        microbatch_size=draw(st.integers(1, 1000)),
        layers=tuple(draw(layer_profiles(name)) for name in names),
        named_edges=draw(st.none() | st.just(edges)),
        device_kinds=draw(kinds),
        loss_couples_rows=draw(st.none() | st.booleans()),
    )


def read(text: str) -> ModelProfile:
    return codec.from_json(ModelProfile, text, path="profile.json", format_name=FORMAT)


@given(model_profiles())
def test_a_profile_is_read_as_it_was_written(profile: ModelProfile) -> None:
    again = read(codec.to_json(profile, format_name=FORMAT))
    assert again == profile
    assert again.digest == profile.digest


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    profile = read(TWO_TOWERS)
    profile.save(tmp_path / "profile.json")
    assert ModelProfile.load(tmp_path / "profile.json") == profile
    assert codec.read_format(tmp_path / "profile.json") == FORMAT


def test_a_profile_survives_pickle_and_can_be_a_key() -> None:
    profile = read(TWO_TOWERS)
    assert {profile: 1}[pickle.loads(pickle.dumps(profile))] == 1


def test_edges_are_a_chain_unless_the_file_names_them() -> None:
    assert ModelProfile.uniform(3, output_bytes=4).edges() == ((0, 1, 4), (1, 2, 4))
    assert ModelProfile.uniform(1).edges() == ()
    assert dataclasses.replace(ModelProfile.uniform(3), named_edges=()).edges() == ()


def test_an_edge_without_bytes_carries_the_output_of_its_producer() -> None:
    assert read(TWO_TOWERS).edges() == ((0, 2, 10), (1, 2, 7))


def test_a_kind_of_device_has_its_own_times_where_they_were_measured() -> None:
    profile = read(TWO_TOWERS)
    assert profile.for_kind("h200") == (LayerTimes(forward_s=0.01, backward_s=0.02, weight_grad_s=0.01),) * 3
    assert profile.for_kind("cpu") == tuple(layer.times for layer in profile.layers)


def test_uniform_layers_split_the_backward_in_halves_unless_told() -> None:
    profile = ModelProfile.uniform(4, forward_s=1.5, backward_s=3.0, saved_bytes=2, parameter_bytes=3, microbatch_size=5)
    assert profile.num_layers == 4
    assert [layer.name for layer in profile.layers] == ["layer0", "layer1", "layer2", "layer3"]
    assert {layer.times for layer in profile.layers} == {LayerTimes(forward_s=1.5, backward_s=3.0, weight_grad_s=1.5)}
    assert {(layer.saved_bytes, layer.parameter_bytes) for layer in profile.layers} == {(2, 3)}
    assert ModelProfile.uniform(1, weight_grad_s=0.5).layers[0].weight_grad_s == 0.5


def test_the_digest_changes_with_every_field() -> None:
    profile = read(TWO_TOWERS)
    others = [
        dataclasses.replace(profile, name="x"),
        dataclasses.replace(profile, microbatch_size=9),
        dataclasses.replace(profile, named_edges=None),
        dataclasses.replace(profile, device_kinds={}),
        dataclasses.replace(profile, loss_couples_rows=True),
        dataclasses.replace(profile, layers=(dataclasses.replace(profile.layers[0], forward_s=0.11), *profile.layers[1:])),
    ]
    assert len({profile.digest, *(other.digest for other in others)}) == 7


def change(*steps: str | int, to: object) -> Callable[[Any], None]:
    def apply(tree: Any) -> None:
        for step in steps[:-1]:
            tree = tree[step]
        tree[steps[-1]] = to

    return apply


@pytest.mark.parametrize(
    ("change", "where", "problem"),
    [
        (change("microbatch_size", to=0), "microbatch_size", "expected a number > 0, got 0"),
        (change("layers", to=[]), "layers", "the model has no layers"),
        (change("layers", 1, "name", to="text"), "layers[1].name", "an earlier layer is called 'text' too"),
        (change("layers", 1, "name", to=""), "layers[1].name", "expected a name, got ''"),
        (change("layers", 1, "forward_s", to=-0.5), "layers[1].forward_s", "expected a number >= 0, got -0.5"),
        (change("layers", 1, "weight_grad_s", to=3), "layers[1].weight_grad_s", "3.0 is more than backward_s, 2.0, of which it is a part"),
        (change("layers", 1, "saved_bytes", to=-1), "layers[1].saved_bytes", "expected a number >= 0, got -1"),
        (change("layers", 1, "gradient_rows", to=-1), "layers[1].gradient_rows", "expected a number >= 0, got -1"),
        (change("layers", 0, "looked_up_rows", to=127), "layers[0].gradient_rows", "128 is more than looked_up_rows, 127"),
        (change("layers", 1, "reread_share", to=1.5), "layers[1].reread_share", "expected a number"),
        (change("layers", 0, "looked_up_bytes", to=41), "layers[0].looked_up_bytes", "41 is more than the trained bytes, 40"),
        (change("layers", 1, "forwrd_s", to=1), "layers[1].forwrd_s", "unknown key; did you mean 'forward_s'?"),
        (change("edge", to=[]), "edge", "unknown key; did you mean 'edges'?"),
        (change("edges", 0, "from", to="txt"), "edges[0].from", "no layer is called 'txt'; did you mean 'text'?"),
        (change("edges", 1, "to", to="lost"), "edges[1].to", "no layer is called 'lost'; did you mean 'loss'?"),
        (change("edges", 0, to={"from": "loss", "to": "text"}), "edges[0]", "'loss' does not stand before 'text'"),
        (change("edges", 0, to={"from": "text", "to": "text"}), "edges[0]", "'text' does not stand before 'text'"),
        (change("edges", 1, "from", to="text"), "edges[1]", "an earlier edge leads from 'text' to 'loss' too"),
        (change("edges", to=[{"from": "text", "to": "loss"}]), "edges", "branches never meet: image, loss have no consumer"),
        (change("edges", 1, "bytes", to=-7), "edges[1].bytes", "expected a number >= 0, got -7"),
        (change("device_kinds", "h200", to=[]), "device_kinds.h200", "expected times of 3 layers, got 0"),
        (change("device_kinds", "h200", 2, "backward_s", to=-1), "device_kinds.h200[2].backward_s", "expected a number >= 0"),
        (
            change("device_kinds", "h200", 2, "weight_grad_s", to=1),
            "device_kinds.h200[2].weight_grad_s",
            "1.0 is more than backward_s, 0.02",
        ),
    ],
)
def test_a_profile_that_cannot_be_true_is_refused(change: Callable[[Any], None], where: str, problem: str) -> None:
    tree = json.loads(TWO_TOWERS)
    change(tree)
    with pytest.raises(FormatError) as caught:
        read(json.dumps(tree))
    assert (caught.value.path, caught.value.where) == ("profile.json", where)
    assert caught.value.problem.startswith(problem)


@pytest.mark.parametrize("field", ["forward_s", "backward_s", "weight_grad_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1e-9])
def test_times_are_finite_and_not_negative(value: float, field: str) -> None:
    with pytest.raises(FormatError, match=f"^LayerTimes: {field}: expected a (finite number|number >= 0), got "):
        LayerTimes(**{"forward_s": 1.0, "backward_s": 2.0, "weight_grad_s": 1.0, field: value})


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "raypipe.plan/1"}')
    with pytest.raises(FormatError, match=r"plan\.json: format: expected 'raypipe\.model_profile/1', got 'raypipe\.plan/1'"):
        ModelProfile.load(tmp_path / "plan.json")


def table_of(num_rows: int, *, gradient_rows: int, row_bytes: int = 4, reread_share: float | None = None) -> LayerProfile:
    """A layer that looks up a table and has another weight of 8 bytes."""
    return LayerProfile(
        name="table",
        forward_s=0,
        backward_s=0,
        weight_grad_s=0,
        output_bytes=0,
        saved_bytes=0,
        parameter_bytes=row_bytes * num_rows + 8,
        gradient_rows=gradient_rows,
        looked_up_rows=num_rows,
        looked_up_bytes=row_bytes * num_rows,
        reread_share=reread_share,
    )


def test_as_many_rows_stay_untouched_as_microbatches_of_random_rows_leave() -> None:
    num_rows, touched, num_microbatches = 1000, 100, 4
    layer = table_of(num_rows, gradient_rows=touched)
    rng = random.Random(0)
    updates = [{row for _ in range(num_microbatches) for row in rng.sample(range(num_rows), touched)} for _ in range(200)]
    assert layer.untouched_bytes(num_microbatches) == pytest.approx(4 * (num_rows - fmean(map(len, updates))), rel=0.01)
    assert replace(layer, looked_up_rows=None).untouched_bytes(num_microbatches) == 0


def test_rows_that_no_reader_touches_again_are_late() -> None:
    table = table_of(100, row_bytes=40, gradient_rows=50, reread_share=0.25)
    # One microbatch touches half of the rows, two three quarters.
    assert [table.late_bytes(num) for num in (1, 2)] == [0.75 * 0.5 * 2000, int(0.75 * 0.25 * 3000)]
    few = replace(table, gradient_rows=10)
    assert few.late_bytes(1) == 0.75 * 0.9 * 400
    assert not replace(few, reread_share=None).late_bytes(1)
    assert not replace(few, reread_share=1.0).has_late_rows
    assert not replace(few, looked_up_bytes=None).late_bytes(1)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_rows_that_are_due_are_at_least_those_that_are_touched_again(power: float) -> None:
    rng = random.Random(0)
    # The n-th row is touched in proportion to n^-power.
    num_rows, half, num_halves, num_microbatches = 5000, 200, 64, 4
    rows = rng.choices(range(num_rows), [(row + 1) ** -power for row in range(num_rows)], k=num_halves * half)

    def touched(size: int) -> list[set[int]]:
        return [set(rows[at : at + size]) for at in range(0, len(rows), size)]

    halves, microbatches, updates = touched(half), touched(2 * half), touched(2 * half * num_microbatches)
    table = table_of(
        num_rows,
        gradient_rows=round(fmean(map(len, microbatches))),
        reread_share=fmean(len(one & other) / len(one) for one, other in pairwise(halves)),
    )
    due = (4 * num_rows - table.untouched_bytes(num_microbatches) - table.late_bytes(num_microbatches)) / 4
    again = fmean(len(one & other) for one, other in pairwise(updates))
    assert 0.97 * again < due < 2.5 * again
