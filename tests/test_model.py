"""How a model says which layer takes which output, and every description that is refused."""

from __future__ import annotations

import pytest
from torch import nn

from raypipe.errors import ConfigError
from raypipe.model import Layer, Model
from raypipe.models.towers import two_towers


def model(*layers: Layer) -> Model:
    return Model(layers, loss=lambda output, _: output.mean())


def layer(name: str, *inputs: str, branch: str | None = None) -> Layer:
    return Layer(name, nn.Identity, inputs=inputs or None, branch=branch)


def test_without_inputs_a_layer_takes_the_one_before_it() -> None:
    assert model(layer("a"), layer("b"), layer("c")).edges() == ((0, 1), (1, 2))


@pytest.mark.parametrize(
    "order", ["left-0 left-1 right-0 right-1 end", "left-0 right-0 left-1 right-1 end", "right-0 left-0 left-1 right-1 end"]
)
def test_in_a_branch_it_takes_the_one_before_it_in_the_branch_however_the_list_interleaves_them(order: str) -> None:
    names = order.split()
    layers = [layer(name, branch=name.partition("-")[0]) for name in names[:-1]]
    made = model(*layers, layer("end", "left-1", "right-1"))
    edges = {(names[source], names[target]) for source, target in made.edges()}
    assert edges == {("left-0", "left-1"), ("right-0", "right-1"), ("left-1", "end"), ("right-1", "end")}
    assert {branch: [names[index] for index in members] for branch, members in made.branches().items()} == {
        "left": ["left-0", "left-1"],
        "right": ["right-0", "right-1"],
    }


def test_branches_may_read_each_other() -> None:
    made = model(
        layer("a-0", branch="a"),
        layer("b-0", branch="b"),
        layer("a-1", "a-0", "b-0", branch="a"),
        layer("b-1", "b-0", "a-0", branch="b"),
        layer("end", "a-1", "b-1"),
    )
    assert made.edges() == ((0, 2), (1, 2), (1, 3), (0, 3), (2, 4), (3, 4))
    assert made.branches() == {"a": (0, 2), "b": (1, 3)}


def test_the_two_towers_are_branches_that_meet_in_the_end() -> None:
    made = two_towers(num_left_layers=2, num_right_layers=1)
    assert made.branches() == {"left": (0, 1), "right": (2,)}
    assert made.layers[-1].branch is None


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ((), "the model has no layers"),
        ((layer("a b"),), "a layer or a branch is called 'a b'; use letters, digits"),
        ((layer("a", branch="the left"),), "a layer or a branch is called 'the left'; use letters, digits"),
        ((layer("a"), layer("a")), "two layers of the model are called 'a'"),
        ((layer("left"), layer("b", "lefft")), "layer 'b' takes 'lefft', but no layer is called that; did you mean 'left'"),
        ((layer("a"), layer("b", "c"), layer("c", "a")), "layer 'b' takes 'c', which comes after it in the list; list it before"),
        ((layer("a"), layer("b", "b")), "circle: b -> b; let one of them take an earlier layer"),
        (
            (layer("a", branch="x"), layer("b", "a", "c", branch="x"), layer("c", "b", branch="y"), layer("end", "b")),
            "layers take each other's outputs in a circle: b -> c -> b",
        ),
        (
            (layer("a", branch="x"), layer("b", branch="y"), layer("c", "b", branch="x"), layer("end", "a", "c")),
            "layer 'c' takes no layer of its branch 'x'",
        ),
        ((layer("a", branch="x"), layer("b", branch="y")), "layers a, b have no consumer; join them in one last layer"),
    ],
)
def test_what_cannot_be_a_model_is_refused(layers: tuple[Layer, ...], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(*layers)
    assert problem in str(caught.value)
