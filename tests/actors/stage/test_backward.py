"""I and W together are the full backward pass, for every kind of module; I alone is about half of it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from raypipe.actors.stage.backward import PendingWeightGradient, backward_full, backward_input

NUM_ROWS, NUM_TOKENS, WIDTH, NUM_WORDS = 3, 5, 8, 11


@pytest.fixture(autouse=True)
def _float64_on_one_thread() -> Iterator[None]:
    num_threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(num_threads)


# What a stage may be made of. Each takes x of shape [row, token, width] and returns the same shape unless it says otherwise.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x_BTD)).chunk(3, dim=-1))
        x_BTD = x_BTD + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x_BTD + self.narrow(F.gelu(self.widen(self.norm2(x_BTD))))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Three projections of one tensor: gate and up are cuts side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class FirstStage(nn.Module):
    """Takes token ids; its pivot is the sum of the embeddings. The head may share the table."""

    def __init__(self, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.table, self.places, self.block = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(NUM_TOKENS, WIDTH), Block()
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight
        if frozen:
            self.table.requires_grad_(False)
            self.places.requires_grad_(False)
        self.pivot: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(NUM_TOKENS))
        self.pivot = [x]
        return self.head(self.block(x))  # type: ignore[no-any-return]


class SplitPivot(nn.Module):
    """The pivot is one of two outputs of a node; the other one is used as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(NUM_WORDS, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pivot: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        left, right = self.table(tokens).chunk(2, dim=-1)
        self.pivot = [left]
        return self.linear(left) * right.exp()  # type: ignore[no-any-return]


class SharedBelow(nn.Module):
    """A node below the pivot leads to a parameter of W and to one that a Python function makes a parameter of I."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.matrix = nn.Embedding(NUM_WORDS, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.pivot: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) @ self.matrix
        self.pivot = [x]
        return MatMul.apply(x, self.matrix)[0]  # type: ignore[no-untyped-call, no-any-return]


class NestedPivots(nn.Module):
    """One pivot lies below the other, and an output passes both by."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pivot: list[Tensor] = []

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        low = self.table(tokens)
        high = self.first(low)
        self.pivot = [high, low]
        return self.second(high).tanh(), self.table(tokens.flip(0)).square()


class Reused(nn.Module):
    """One layer several times."""

    def __init__(self, layer: nn.Module, *, num_uses: int) -> None:
        super().__init__()
        self.layer, self.last, self.num_uses = layer, nn.Linear(WIDTH, WIDTH), num_uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_uses):
            x = torch.tanh(self.layer(x))
        return self.last(x)  # type: ignore[no-any-return]


class MadeWeight(nn.Module):
    """Two layers share a weight that is computed from parameters; one of these serves a single layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made = (self.a @ self.b).softmax(-1)
        return F.linear(F.linear(x, made).tanh(), made * self.c).tanh() @ made.t()


class BranchesAndOutputs(nn.Module):
    """Parallel branches, an output that passes the inputs by, one that is a parameter, one twice, one integer, one constant."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.bias = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        left, right = self.left(x), self.right(x.sin())
        y = left * right + self.bias
        aside = self.right(torch.ones(WIDTH)) * self.bias
        return y, y, aside, self.bias, left, y.argmax(-1), torch.ones(3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (hidden, _) = self.lstm(x)
        return y, hidden


class MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight, x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        COUNTER["backward"] += 1
        return gradients[0] @ weight.t() + gradients[1], x.flatten(0, -2).t() @ gradients[0].flatten(0, -2)


COUNTER = {"backward": 0}


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.weight, self.after = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = MatMul.apply(self.before(x), self.weight)  # type: ignore[no-untyped-call]
        return self.after(y)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.row = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).neg_()
        y += self.scale.expand_as(y)
        y[:, 0] = self.row * 2
        y[:, 1].mul_(self.scale)
        return y  # type: ignore[no-any-return]


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(NUM_TOKENS, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, NUM_TOKENS, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


class FrozenAndUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.half_frozen, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.half_frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.half_frozen(self.frozen(self.first(x).tanh()))  # type: ignore[no-any-return]


class TwoInputs(nn.Module):
    """A second input that goes straight through, a third that is not used and a fourth of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(NUM_WORDS, WIDTH)

    def forward(self, x: Tensor, passed: Tensor, unused: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002, RUF100
        return self.linear(x) + passed * self.table(tokens), passed


class Parameterless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * x


def five_fold(_: nn.Module, input_gradients: Any, __: Any) -> tuple[Tensor]:
    return (input_gradients[0] * 5,)


class HookedOnce(nn.Module):
    """Hooks that change gradients on the outputs of layers that are used once, on the pivot and on a parameter."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_WORDS)
        if tied:
            self.second.weight = self.table.weight
        self.place = nn.Parameter(torch.randn(WIDTH))
        self.first.weight.register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]
        self.pivot: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens[:, 0]) + self.place
        y = self.first(x)
        z = self.second(y)
        for tensor in (x, y, z):
            tensor.register_hook(lambda gradient: gradient * 7 + 1)
        self.pivot = [x]
        return z  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """Hooks that change gradients: on layer outputs, on a module and on parameters, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.weight.register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]
        self.second.bias.register_hook(lambda gradient: gradient + 1)  # type: ignore[no-untyped-call]
        self.second.register_full_backward_hook(five_fold)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x[:, 0])
        y.register_hook(lambda gradient: 7 * gradient)
        z = self.second(self.first(y)).tanh()
        return self.second(z)  # type: ignore[no-any-return]


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.float32)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.first(self.second(self.first(x.float())).relu()).double()  # type: ignore[no-any-return]


def floats() -> tuple[Tensor, ...]:
    return (torch.randn(NUM_ROWS, NUM_TOKENS, WIDTH, requires_grad=True),)


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(NUM_WORDS, (NUM_ROWS, NUM_TOKENS)),)


def four() -> tuple[Tensor, ...]:
    return (*floats(), *floats(), *floats(), *tokens())


@dataclass(frozen=True)
class Case:
    """A kind of stage, how to make its inputs, and the parameters whose gradients I may have to compute."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]] = floats
    early: tuple[str, ...] = ()


CASES = {
    "linear": Case(lambda: nn.Linear(WIDTH, WIDTH)),
    "linear stack": Case(lambda: nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])),
    "identity": Case(nn.Identity),
    "no parameters": Case(Parameterless),
    "convolution and batch norm": Case(Convolutional),
    "transformer blocks": Case(lambda: nn.Sequential(Block(), Block())),
    "torch's transformer layer": Case(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)),
    "gated": Case(lambda: nn.Sequential(Gated(), Gated())),
    "first stage": Case(FirstStage, tokens),
    "tied first stage": Case(lambda: FirstStage(tied=True), tokens, ("table.weight",)),
    "frozen embedding": Case(lambda: FirstStage(frozen=True), tokens),
    "pivot with a sibling": Case(SplitPivot, tokens),
    "shared below the pivot": Case(SharedBelow, tokens, ("matrix",)),
    "nested pivots": Case(NestedPivots, tokens),
    "embedding only": Case(lambda: nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, 2)), tokens),
    "used twice": Case(lambda: Reused(nn.Linear(WIDTH, WIDTH), num_uses=2), early=("layer",)),
    "used three times": Case(lambda: Reused(Block(), num_uses=3), early=("layer",)),
    "made weight": Case(MadeWeight, early=("a", "b")),
    "branches and outputs": Case(BranchesAndOutputs, early=("right", "bias")),
    "recurrent": Case(Recurrent, early=("lstm.",)),
    "custom function": Case(Custom, early=("weight",)),
    "checkpointed": Case(Checkpointed),
    "in place": Case(InPlace, early=("scale",)),
    "frozen and unused": Case(FrozenAndUnused),
    "several inputs": Case(TwoInputs, four),
    "hooked": Case(Hooked, early=("first", "second")),
    "hooked once": Case(HookedOnce, tokens),
    "hooked and tied": Case(lambda: HookedOnce(tied=True), tokens, ("table",)),
    "autocast": Case(Autocast, early=("first",)),
}


def outputs_of(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = module(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def random_gradients(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    return [torch.randn_like(output) if output.is_floating_point() else None for output in outputs]


def take_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return gradients


def plain_backward(
    module: nn.Module, inputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None] | None = None
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The output gradients used, and the input gradients of torch's own backward pass."""
    outputs = outputs_of(module, inputs)
    output_gradients = random_gradients(outputs) if output_gradients is None else list(output_gradients)
    pairs = [(y, g) for y, g in zip(outputs, output_gradients, strict=True) if g is not None and y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    gradients = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    return output_gradients, gradients


def split(
    module: nn.Module, inputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None]
) -> tuple[tuple[Tensor | None, ...], PendingWeightGradient]:
    outputs = outputs_of(module, inputs)
    return backward_input(outputs, output_gradients, inputs, list(module.parameters()), pivot=getattr(module, "pivot", ()))


def assert_same(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [gradient is None for gradient in got] == [gradient is None for gradient in expected]
    torch.testing.assert_close(list(got), list(expected), rtol=1e-12, atol=1e-12)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_input_and_weight_gradients_are_those_of_the_plain_backward_pass(case: Case) -> None:
    module, inputs = case.make(), case.inputs()
    output_gradients, expected_inputs = plain_backward(module, inputs)
    expected = take_gradients(module)
    input_gradients, pending = split(module, inputs, output_gradients)
    assert_same(input_gradients, expected_inputs)
    pending.run()
    assert_same(list(take_gradients(module).values()), list(expected.values()))


def test_the_full_backward_pass_is_the_plain_one(case: Case) -> None:
    module, inputs = case.make(), case.inputs()
    output_gradients, expected_inputs = plain_backward(module, inputs)
    expected = take_gradients(module)
    got = backward_full(outputs_of(module, inputs), output_gradients, inputs, list(module.parameters()))
    assert_same(got, expected_inputs)
    assert_same(list(take_gradients(module).values()), list(expected.values()))


def test_weight_gradients_may_come_late_and_out_of_order(case: Case) -> None:
    module, microbatches = case.make(), [case.inputs() for _ in range(4)]
    references = [plain_backward(module, inputs) for inputs in microbatches]
    expected = take_gradients(module)
    pending = []
    for inputs, (output_gradients, expected_inputs) in zip(microbatches, references, strict=True):
        input_gradients, weight_part = split(module, inputs, output_gradients)
        assert_same(input_gradients, expected_inputs)
        pending.append(weight_part)
        if len(pending) == 3:
            pending.pop(1).run()
    for weight_part in pending[::-1]:
        weight_part.run()
    assert_same(list(take_gradients(module).values()), list(expected.values()))


def test_the_input_gradient_touches_no_grad(case: Case) -> None:
    module, inputs = case.make(), case.inputs()
    output_gradients, _ = plain_backward(module, inputs)
    take_gradients(module)
    split(module, inputs, output_gradients)
    assert all(tensor.grad is None for tensor in [*module.parameters(), *inputs])


def test_only_weights_that_cannot_wait_are_computed_with_the_input_gradient(case: Case) -> None:
    module, inputs = case.make(), case.inputs()
    output_gradients, _ = plain_backward(module, inputs)
    take_gradients(module)
    # Tensor hooks run where a gradient is computed.
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda _, name=name: seen.append(name))  # type: ignore[no-untyped-call]
    split(module, inputs, output_gradients)
    assert [name for name in seen if not name.startswith(case.early)] == []
    assert len(seen) == len(set(seen))


def test_nothing_keeps_the_graph_alive_after_the_weight_gradient(case: Case) -> None:
    module, inputs = case.make(), case.inputs()
    tracked: list[weakref.ref[Marker]] = []
    output_gradients = random_gradients(outputs_of(module, inputs))
    take_gradients(module)
    outputs = tuple(track(output, tracked) if output.requires_grad else output for output in outputs_of(module, track_all(inputs, tracked)))
    _, pending = backward_input(outputs, output_gradients, inputs, list(module.parameters()), pivot=getattr(module, "pivot", ()))
    getattr(module, "pivot", []).clear()
    del outputs
    pending.run()
    gc.disable()  # no reference cycle either: memory is given back at once
    try:
        assert [ref() for ref in tracked if ref() is not None] == []
    finally:
        gc.enable()


def test_a_pending_weight_gradient_that_is_dropped_frees_the_graph() -> None:
    module, (x,) = Block(), floats()
    tracked: list[weakref.ref[Marker]] = []
    (y,) = outputs_of(module, track_all([x], tracked))
    _, pending = backward_input([y], [torch.ones_like(y)], [x], list(module.parameters()))
    del y
    assert tracked[0]() is not None
    del pending
    assert tracked[0]() is None


class Marker:
    """Lives as long as the graph node that holds it."""


class Tracked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, refs: list[weakref.ref[Marker]]) -> Tensor:
        ctx.marker = Marker()
        refs.append(weakref.ref(ctx.marker))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004, RUF100
        return gradients[0], None


def track(tensor: Tensor, refs: list[weakref.ref[Marker]]) -> Tensor:
    return Tracked.apply(tensor, refs)  # type: ignore[no-untyped-call, no-any-return]


def track_all(tensors: Sequence[Tensor], refs: list[weakref.ref[Marker]]) -> list[Tensor]:
    return [track(tensor, refs) if tensor.requires_grad else tensor for tensor in tensors]


def test_a_second_run_is_an_assertion_error() -> None:
    module, (x,) = nn.Linear(WIDTH, WIDTH), floats()
    _, pending = split(module, (x,), [torch.ones(NUM_ROWS, NUM_TOKENS, WIDTH)])
    pending.run()
    with pytest.raises(AssertionError, match="already"):
        pending.run()


def test_an_input_that_is_not_a_leaf_is_an_assertion_error() -> None:
    (x,) = floats()
    y = x * 2
    with pytest.raises(AssertionError, match="detach"):
        backward_input([y.sin()], [torch.ones_like(y)], [y], [])


def test_an_output_without_a_gradient_contributes_nothing() -> None:
    module, inputs = BranchesAndOutputs(), floats()
    for kept in range(5):
        output_gradients = [gradient if number == kept else None for number, gradient in enumerate(plain_backward(module, inputs)[0])]
        take_gradients(module)
        _, expected_inputs = plain_backward(module, inputs, output_gradients)
        expected = take_gradients(module)
        input_gradients, pending = split(module, inputs, output_gradients)
        pending.run()
        assert_same(input_gradients, expected_inputs)
        assert_same(list(take_gradients(module).values()), list(expected.values()))


def test_without_any_output_gradient_nothing_happens() -> None:
    module, inputs = Block(), floats()
    assert backward_full(outputs_of(module, inputs), [None], inputs, list(module.parameters())) == (None,)
    input_gradients, pending = split(module, inputs, [None])
    pending.run()
    assert input_gradients == (None,)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_an_input_given_twice_gets_its_gradient_twice() -> None:
    module, (x,) = Block(), floats()
    output_gradients, expected = plain_backward(module, (x,))
    parameters = list(module.parameters())
    assert_same(backward_full(outputs_of(module, (x,)), output_gradients, (x, x), parameters), expected * 2)
    assert_same(backward_input(outputs_of(module, (x,)), output_gradients, (x, x), parameters)[0], expected * 2)


def test_a_torch_without_its_engine_at_hand_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = Block(), floats()
    output_gradients, expected = plain_backward(module, inputs)
    monkeypatch.setattr("raypipe.actors.stage.backward._ENGINE", None)
    assert_same(backward_full(outputs_of(module, inputs), output_gradients, inputs, list(module.parameters())), expected)


def test_inputs_are_left_without_a_grad() -> None:
    module, (x,) = Block(), floats()
    output_gradients, expected = plain_backward(module, (x,))
    x.grad = None
    assert_same(backward_full(outputs_of(module, (x,)), output_gradients, (x,), list(module.parameters())), expected)
    input_gradients, pending = split(module, (x,), output_gradients)
    pending.run()
    assert_same(input_gradients, expected)
    assert x.grad is None


def test_without_inputs_and_pivot_everything_is_left_to_the_weight_gradient() -> None:
    module, (ids,) = FirstStage(), tokens()
    output_gradients, _ = plain_backward(module, (ids,))
    expected = take_gradients(module)
    outputs = outputs_of(module, (ids,))
    with FlopCounterMode(display=False) as flops:
        input_gradients, pending = backward_input(outputs, output_gradients, (ids,), list(module.parameters()))
    assert flops.get_total_flops() == 0
    assert input_gradients == (None,)
    pending.run()
    assert_same(list(take_gradients(module).values()), list(expected.values()))


def test_only_the_given_parameters_get_a_gradient() -> None:
    module, inputs = Block(), floats()
    outputs = outputs_of(module, inputs)
    _, pending = backward_input(outputs, random_gradients(outputs), inputs, [module.widen.weight])
    pending.run()
    assert [name for name, parameter in module.named_parameters() if parameter.grad is not None] == ["widen.weight"]


def test_parameters_replaced_by_functional_call_get_the_gradients() -> None:
    module, (x,) = Block(), floats()
    replaced = {name: torch.randn_like(parameter).requires_grad_() for name, parameter in module.named_parameters()}
    expected_y = torch.func.functional_call(module, replaced, (x,))
    output_gradient = torch.randn_like(expected_y)
    expected = torch.autograd.grad(expected_y, [x, *replaced.values()], output_gradient)
    y = torch.func.functional_call(module, replaced, (x,))
    input_gradients, pending = backward_input([y], [output_gradient], [x], list(replaced.values()))
    pending.run()
    assert_same([*input_gradients, *(parameter.grad for parameter in replaced.values())], expected)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_gradients_accumulate_in_place_in_the_dtype_of_the_parameter() -> None:
    module, inputs = Autocast(), floats()
    output_gradients, _ = plain_backward(module, inputs)
    take_gradients(module)
    split(module, inputs, output_gradients)[1].run()
    first = {name: parameter.grad for name, parameter in module.named_parameters()}
    split(module, inputs, output_gradients)[1].run()
    for name, parameter in module.named_parameters():
        assert parameter.grad is first[name]
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_hooks_after_accumulation_run_once_a_microbatch_and_with_the_weight_gradient(case: Case) -> None:
    module, inputs = case.make(), case.inputs()
    output_gradients, _ = plain_backward(module, inputs)
    seen: list[str] = []
    with_gradient = {name for name, gradient in take_gradients(module).items() if gradient is not None}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))  # type: ignore[no-untyped-call]
    _, pending = split(module, inputs, output_gradients)
    assert seen == []
    pending.run()
    assert sorted(seen) == sorted(with_gradient)


def test_hooks_are_removed_from_a_graph_that_lives_on() -> None:
    bias, (x,) = nn.Parameter(torch.randn(WIDTH)), floats()
    y = x.sin() + bias
    _, pending = backward_input([y], [torch.ones_like(y)], [x], [bias])
    pending.run()
    arrived: list[Tensor] = []
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda _, gradients: arrived.append(gradients[0]))
    torch.autograd.grad(y, bias, torch.full_like(y, 2.0))
    assert torch.equal(arrived[0], torch.full_like(y, 2.0))


def test_a_graph_deeper_than_the_python_stack_is_walked() -> None:
    scale, (x,) = nn.Parameter(torch.ones(())), floats()
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    y = x @ weight
    for _ in range(3000):
        y = y.neg()
    _, pending = backward_input([y * scale], [torch.ones_like(y)], [x], [weight, scale])
    pending.run()
    assert weight.grad is not None
    assert scale.grad is not None


@pytest.mark.parametrize("make", [lambda: linears(bias=True), lambda: linears(bias=False)])
def test_the_input_gradient_of_linear_layers_costs_half_of_the_backward_pass(make: Callable[[], nn.Module]) -> None:
    full, only_input, only_weight = flops_of(make(), floats())
    assert only_input == only_weight == full / 2


@pytest.mark.parametrize(
    "name", ["convolution and batch norm", "transformer blocks", "gated", "used three times", "recurrent", "first stage"]
)
def test_input_and_weight_gradient_together_cost_no_more_than_the_backward_pass(name: str) -> None:
    full, only_input, only_weight = flops_of(CASES[name].make(), CASES[name].inputs())
    assert only_input + only_weight == full


def linears(*, bias: bool) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH, bias=bias), nn.Tanh())])


def flops_of(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[int, int, int]:
    """Floating-point operations of the full backward pass, of I and of W."""
    outputs = outputs_of(module, inputs)
    output_gradients = random_gradients(outputs)
    with FlopCounterMode(display=False) as full:
        backward_full(outputs, output_gradients, inputs, list(module.parameters()))
    outputs = outputs_of(module, inputs)
    with FlopCounterMode(display=False) as only_input:
        _, pending = backward_input(outputs, output_gradients, inputs, list(module.parameters()), pivot=getattr(module, "pivot", ()))
    with FlopCounterMode(display=False) as only_weight:
        pending.run()
    return full.get_total_flops(), only_input.get_total_flops(), only_weight.get_total_flops()


def test_a_python_function_runs_once() -> None:
    module, inputs = Custom(), floats()
    output_gradients, _ = plain_backward(module, inputs)
    COUNTER["backward"] = 0
    split(module, inputs, output_gradients)[1].run()
    assert COUNTER["backward"] == 1


def test_a_checkpointed_segment_is_recomputed_once_for_the_input_gradient_and_then_once_for_each_of_its_layers() -> None:
    module, inputs = Checkpointed(), floats()
    runs: list[str] = []
    module.inner.register_forward_hook(lambda *_: runs.append("end"))
    module.inner.norm1.register_forward_hook(lambda *_: runs.append("start"))
    output_gradients, _ = plain_backward(module, inputs)
    runs.clear()
    _, pending = split(module, inputs, output_gradients)
    num_forwards_and_recomputes_in_i = runs.count("start")
    pending.run()
    assert num_forwards_and_recomputes_in_i == 2
    assert runs.count("start") == 2 + 6


class RandomGraph(nn.Module):
    """A graph of small operations; each takes one or two earlier tensors, and a weight that others may take too."""

    OPERATIONS = ("linear", "norm", "scale", "add", "multiply", "gelu", "halves", "parameter", "in_place", "function")

    def __init__(self, *, seed: int, num_operations: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        num_weights = max(1, num_operations // 2)
        self.matrices = nn.ParameterList(torch.randn(4, 4) for _ in range(num_weights))
        self.vectors = nn.ParameterList(torch.randn(4) for _ in range(num_weights))
        for weight in [*self.matrices, *self.vectors]:
            weight.requires_grad_(rng.random() < 0.85)
        self.steps = [
            (rng.choice(self.OPERATIONS), rng.randrange(num_inputs + n), rng.randrange(num_inputs + n), rng.randrange(num_weights))
            for n in range(num_operations)
        ]
        self.pivot_at = [n for n in range(num_operations) if rng.random() < 0.15]
        self.kept = [rng.randrange(num_inputs + num_operations) for _ in range(num_outputs)]
        self.pivot: list[Tensor] = []

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = list(inputs)
        self.pivot = []
        for position, (operation, a, b, weight) in enumerate(self.steps):
            tensors.append(self.apply_step(operation, tensors[a], tensors[b], weight))
            if position in self.pivot_at and tensors[-1].grad_fn is not None:
                self.pivot.append(tensors[-1])
        return tuple(tensors[n] for n in self.kept)

    def apply_step(self, operation: str, a: Tensor, b: Tensor, weight: int) -> Tensor:  # noqa: PLR0911
        matrix, vector = self.matrices[weight], self.vectors[weight]
        match operation:
            case "linear":
                return F.linear(a, matrix, vector)
            case "norm":
                return F.layer_norm(a, (4,), vector, matrix[0])
            case "scale":
                return torch.mul(a, vector)
            case "add":
                return a + b
            case "multiply":
                return a.tanh() * b.sin()
            case "gelu":
                return F.gelu(a)
            case "halves":
                left, right = (a @ matrix).chunk(2, dim=-1)
                return torch.cat([right, left.sin()], dim=-1)
            case "parameter":
                return torch.mv(matrix, vector).expand(2, 4)
            case "in_place":
                return a.clone().mul_(vector).tanh()
            case _:
                return MatMul.apply(a, matrix)[0].tanh()  # type: ignore[no-untyped-call, no-any-return]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_operations=st.integers(1, 14),
    takes_gradient=st.lists(st.booleans(), min_size=1, max_size=3),
    num_outputs=st.integers(1, 3),
    with_pivot=st.booleans(),
)
def test_random_graphs_have_the_gradients_of_the_plain_backward_pass(
    *, seed: int, num_operations: int, takes_gradient: list[bool], num_outputs: int, with_pivot: bool
) -> None:
    torch.manual_seed(seed)
    module = RandomGraph(seed=seed, num_operations=num_operations, num_inputs=len(takes_gradient), num_outputs=num_outputs)
    inputs = tuple(torch.randn(2, 4).requires_grad_(takes) for takes in takes_gradient)
    output_gradients, expected_inputs = plain_backward(module, inputs)
    expected = take_gradients(module)
    outputs = outputs_of(module, inputs)
    pivot = module.pivot if with_pivot else ()
    input_gradients, pending = backward_input(outputs, output_gradients, inputs, list(module.parameters()), pivot=pivot)
    del outputs
    assert all(parameter.grad is None for parameter in module.parameters())
    pending.run()
    assert_same(input_gradients, expected_inputs)
    got = take_gradients(module)
    # The order of sums may differ where a weight has many uses; values grow with the depth of the graph.
    assert [g is None for g in got.values()] == [g is None for g in expected.values()]
    torch.testing.assert_close(list(got.values()), list(expected.values()), rtol=1e-9, atol=1e-9)
