"""The models that come with raypipe: sizes, causality, types, dropout, start weights, and that they learn."""

from __future__ import annotations

import ctypes
import math
import pickle
import threading
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from raypipe.data.masking import NO_TARGET, mask_rows
from raypipe.errors import ConfigError, InputError, UnknownNameError
from raypipe.model import Model
from raypipe.models.bert import bert
from raypipe.models.clip import clip
from raypipe.models.gpt import gpt
from raypipe.models.mlp import mlp
from raypipe.models.ngram_gpt import ngram_gpt, ngram_rows
from raypipe.models.towers import two_towers
from raypipe.models.vqa import vqa
from raypipe.models.waiting import sleep
from tests.models.layers import build, forward, num_parameters


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_that_it_learns(model: Model, modules: Mapping[str, nn.Module], batch: Mapping[str, Tensor], *, num_steps: int) -> None:
    optimizer = torch.optim.AdamW([parameter for module in modules.values() for parameter in module.parameters()], lr=1e-2)
    losses = []
    for _ in range(num_steps):
        loss = model.loss(forward(model, modules, batch), batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3
    assert losses[-1] < 0.5


def small_gpt(*, dropout: float = 0.0, dtype: str = "float32") -> Model:
    return gpt(num_layers=2, d_model=16, num_heads=2, sequence_length=8, vocabulary_size=32, dropout=dropout, dtype=dtype)


def token_batch(*, rows: int = 2, length: int = 8, vocabulary_size: int = 32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(vocabulary_size, (rows, length + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class TestGpt:
    def test_it_has_three_and_a_third_million_parameters_by_default(self) -> None:
        model = gpt()
        assert [layer.name for layer in model.layers] == ["embedding", "block-0", "block-1", "block-2", "block-3", "head"]
        assert 3_250_000 < num_parameters(build(model)) < 3_350_000

    def test_logits_have_one_row_a_position_and_the_loss_is_a_scalar(self) -> None:
        model, batch = small_gpt(), token_batch()
        logits = forward(model, build(model), batch)
        assert logits.shape == (2, 8, 32)
        assert model.loss(logits, batch).shape == ()

    def test_an_untrained_model_guesses_evenly(self) -> None:
        model, batch = small_gpt(), token_batch()
        loss = model.loss(forward(model, build(model), batch), batch)
        assert loss.item() == pytest.approx(math.log(32), abs=0.05)

    def test_the_loss_is_the_mean_over_rows(self) -> None:
        model, batch = small_gpt(dtype="float64"), token_batch(rows=4)
        logits = forward(model, build(model), batch)
        rows = [model.loss(logits[row : row + 1], {"targets": batch["targets"][row : row + 1]}) for row in range(4)]
        torch.testing.assert_close(model.loss(logits, batch), torch.stack(rows).mean())

    @pytest.mark.parametrize("changed", [3, 7])
    def test_a_later_token_changes_no_earlier_logits(self, changed: int) -> None:
        model, batch = small_gpt(), token_batch()
        modules = build(model)
        before = forward(model, modules, batch)
        tokens = batch["tokens"].clone()
        tokens[:, changed] = (tokens[:, changed] + 1) % 32
        after = forward(model, modules, {"tokens": tokens})
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=0)
        assert not torch.equal(after[:, changed], before[:, changed])

    def test_a_token_changes_all_later_logits(self) -> None:
        model, batch = small_gpt(), token_batch(rows=1)
        modules = build(model)
        tokens = batch["tokens"].clone()
        tokens[0, 0] = (tokens[0, 0] + 1) % 32
        changed = (forward(model, modules, {"tokens": tokens}) != forward(model, modules, batch)).any(dim=-1)
        assert changed.all()

    def test_the_same_token_has_other_logits_at_another_position(self) -> None:
        model = small_gpt()
        logits = forward(model, build(model), {"tokens": torch.full((1, 8), 5)})
        assert not torch.allclose(logits[0, 0], logits[0, 1])

    def test_shorter_sequences_than_the_model_knows_are_read(self) -> None:
        model, batch = small_gpt(), token_batch()
        modules = build(model)
        short = forward(model, modules, {"tokens": batch["tokens"][:, :3]})
        torch.testing.assert_close(short, forward(model, modules, batch)[:, :3])

    @pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
    def test_the_dtype_holds_for_parameters_and_states(self, dtype: str) -> None:
        model, batch = small_gpt(dtype=dtype), token_batch()
        modules = build(model)
        expected = getattr(torch, dtype)
        logits = forward(model, modules, batch)
        assert {parameter.dtype for module in modules.values() for parameter in module.parameters()} == {expected}
        assert logits.dtype == expected
        # Where the loss is taken in less than float32, its gradients round to nothing.
        assert model.loss(logits, batch).dtype == (torch.float64 if dtype == "float64" else torch.float32)

    def test_every_parameter_gets_a_gradient(self) -> None:
        model, batch = small_gpt(), token_batch()
        modules = build(model)
        torch.autograd.backward(model.loss(forward(model, modules, batch), batch))
        for name, module in modules.items():
            for key, parameter in module.named_parameters():
                assert parameter.grad is not None, f"{name}.{key}"
                assert parameter.grad.count_nonzero(), f"{name}.{key}"

    def test_dropout_acts_in_training_only_and_follows_the_generator(self) -> None:
        model, batch = small_gpt(dropout=0.5), token_batch()
        modules = build(model)

        def run(seed: int) -> Tensor:
            torch.manual_seed(seed)
            return forward(model, modules, batch)

        assert torch.equal(run(1), run(1))
        assert not torch.equal(run(1), run(2))
        for module in modules.values():
            module.eval()
        assert torch.equal(run(1), run(2))
        plain = small_gpt()
        torch.testing.assert_close(run(1), forward(plain, build(plain), batch))

    def test_attention_drops_too(self) -> None:
        block = small_gpt(dropout=0.5).layers[1].build()
        assert isinstance(block.dropout, nn.Module)
        # Identity in place of the residual dropout leaves that of the attention weights alone.
        block.dropout.eval()
        x = torch.randn(1, 8, 16)
        assert not torch.equal(block(x), block(x))

    def test_weights_start_as_in_gpt_2(self) -> None:
        modules = build(gpt())
        residual = 0.02 / math.sqrt(2 * 4)
        expected = {"attention_out.weight": residual, "mlp_out.weight": residual}
        for name, module in modules.items():
            for key, parameter in module.named_parameters():
                if "norm" in key:
                    assert torch.equal(parameter, torch.ones_like(parameter) if key.endswith("weight") else torch.zeros_like(parameter))
                elif key.endswith("bias"):
                    assert not parameter.count_nonzero(), f"{name}.{key}"
                else:
                    std, mean = torch.std_mean(parameter)
                    assert std.item() == pytest.approx(expected.get(key, 0.02), rel=0.02), f"{name}.{key}"
                    assert abs(mean.item()) < 0.02 * std.item(), f"{name}.{key}"

    def test_a_layer_starts_from_its_seed_alone(self) -> None:
        one, same, other = build(small_gpt(), seed=1), build(small_gpt(), seed=1), build(small_gpt(), seed=2)
        assert torch.equal(one["head"].get_parameter("logits.weight"), same["head"].get_parameter("logits.weight"))
        assert not torch.equal(one["head"].get_parameter("logits.weight"), other["head"].get_parameter("logits.weight"))

    def test_a_few_steps_of_adamw_learn_a_sequence(self) -> None:
        model = small_gpt()
        modules = build(model)
        tokens = torch.arange(9).repeat(4, 1)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        check_that_it_learns(model, modules, batch, num_steps=30)

    def test_longer_sequences_than_the_model_knows_are_refused(self) -> None:
        embedding = small_gpt().layers[0].build()
        with pytest.raises(ConfigError, match="sequences have 9 tokens, but the model's sequence_length is 8"):
            embedding(torch.zeros(1, 9, dtype=torch.int64))

    def test_arguments_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="num_heads must divide d_model: 256 is no multiple of 3"):
            gpt(num_heads=3)
        with pytest.raises(ConfigError, match=r"num_layers must be at least 1 and at most .*, not 0"):
            gpt(num_layers=0)
        with pytest.raises(ConfigError, match="dropout must be at least 0 and less than 1, not 1"):
            gpt(dropout=1.0)
        with pytest.raises(UnknownNameError, match="no dtype is called 'float46'; did you mean 'float64'"):
            gpt(dtype="float46")


def small_bert(*, dtype: str = "float32") -> Model:
    return bert(num_layers=2, d_model=16, num_heads=2, sequence_length=20, vocabulary_size=32, dtype=dtype)


def masked_batch(*, rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens, targets = mask_rows(torch.randint(32, (rows, 20)).numpy(), first=0, seed=0, vocabulary_size=32)
    return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}


class TestNgramGpt:
    def small(self) -> Model:
        return ngram_gpt(num_layers=1, d_model=16, num_heads=2, sequence_length=8, vocabulary_size=32, table_rows=101)

    def test_it_has_six_million_parameters_by_default(self) -> None:
        assert 5_950_000 < num_parameters(build(ngram_gpt())) < 6_050_000

    @pytest.mark.parametrize("order", [2, 3, 5, 40])
    def test_a_row_is_the_number_of_the_n_gram_modulo_those_of_the_table(self, order: int) -> None:
        tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
        padded = [0] * (order - 1) + tokens[0].tolist()
        numbers = [sum(token * 256**place for place, token in enumerate(reversed(padded[at : at + order]))) for at in range(8)]
        assert ngram_rows(tokens, order=order, vocabulary_size=256, table_rows=1009).tolist() == [[number % 1009 for number in numbers]]

    def test_it_reads_the_rows_that_it_names(self) -> None:
        model, batch = self.small(), token_batch()
        modules = build(model)
        torch.autograd.backward(model.loss(forward(model, modules, batch), batch))
        for name, rows in model.layers[0].looked_up.items():
            gradient = modules["embedding"].get_parameter(name).grad
            assert gradient is not None
            assert gradient.abs().sum(dim=1).nonzero().flatten().tolist() == torch.unique(rows(batch["tokens"])).tolist()

    def test_a_later_token_changes_no_earlier_logits(self) -> None:
        model, batch = self.small(), token_batch()
        modules = build(model)
        tokens = batch["tokens"].clone()
        tokens[:, 4] = (tokens[:, 4] + 1) % 32
        before, after = forward(model, modules, batch), forward(model, modules, {"tokens": tokens})
        torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=0)
        assert not torch.equal(after[:, 4], before[:, 4])

    def test_it_learns_a_batch(self) -> None:
        model = self.small()
        check_that_it_learns(model, build(model), token_batch(), num_steps=60)

    @pytest.mark.parametrize("orders", [(), (1, 2), (2, 2)])
    def test_orders_that_are_none_are_refused(self, orders: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match="different numbers from 2 on"):
            ngram_gpt(orders=orders)


class TestBert:
    def test_it_is_as_large_as_gpt_but_for_the_mask_and_a_dense_layer(self) -> None:
        dense = 256 * 256 + 256 + 2 * 256
        assert num_parameters(build(bert())) == num_parameters(build(gpt())) + 256 + dense

    def test_an_untrained_model_guesses_evenly(self) -> None:
        model, batch = small_bert(), masked_batch()
        logits = forward(model, build(model), batch)
        assert logits.shape == (4, 20, 32)
        assert model.loss(logits, batch).item() == pytest.approx(math.log(32), abs=0.05)

    @pytest.mark.parametrize("changed", [0, 7, 19])
    def test_a_token_changes_the_logits_of_all_positions(self, changed: int) -> None:
        model, batch = small_bert(), masked_batch(rows=1)
        modules = build(model)
        before = forward(model, modules, batch)
        tokens = batch["tokens"].clone()
        tokens[:, changed] = (tokens[:, changed] + 1) % 32
        assert (forward(model, modules, {"tokens": tokens}) != before).any(dim=-1).all()

    def test_the_loss_is_the_mean_over_the_masked_positions_and_over_the_rows(self) -> None:
        model, batch = small_bert(dtype="float64"), masked_batch()
        logits = forward(model, build(model), batch)
        told = batch["targets"] != NO_TARGET
        by_hand = -logits[told].log_softmax(-1).gather(1, batch["targets"][told].unsqueeze(1)).mean()
        torch.testing.assert_close(model.loss(logits, batch), by_hand)
        rows = [model.loss(logits[row : row + 1], {"targets": batch["targets"][row : row + 1]}) for row in range(4)]
        torch.testing.assert_close(by_hand, torch.stack(rows).mean())

    def test_every_parameter_gets_a_gradient(self) -> None:
        model, batch = small_bert(), masked_batch()
        modules = build(model)
        torch.autograd.backward(model.loss(forward(model, modules, batch), batch))
        for name, module in modules.items():
            for key, parameter in module.named_parameters():
                assert parameter.grad is not None, f"{name}.{key}"
                assert parameter.grad.count_nonzero(), f"{name}.{key}"

    def test_a_few_steps_of_adamw_learn_what_is_masked(self) -> None:
        model = small_bert()
        modules = build(model)
        tokens, targets = mask_rows(torch.arange(20).repeat(8, 1).numpy(), first=0, seed=0, vocabulary_size=32)
        batch = {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
        check_that_it_learns(model, modules, batch, num_steps=40)

    def test_arguments_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="num_heads must divide d_model: 256 is no multiple of 3"):
            bert(num_heads=3)


class TestMlp:
    def test_it_maps_inputs_to_outputs_of_the_same_width(self) -> None:
        model = mlp(num_layers=3, width=5, dtype="float64")
        assert [layer.name for layer in model.layers] == ["layer-0", "layer-1", "layer-2"]
        batch = {"inputs": torch.randn(7, 5, dtype=torch.float64), "targets": torch.zeros(7, 5, dtype=torch.float64)}
        output = forward(model, build(model), batch)
        assert output.shape == (7, 5)
        assert output.dtype == torch.float64
        torch.testing.assert_close(model.loss(output, batch), output.square().mean())

    def test_all_layers_but_the_last_end_in_tanh(self) -> None:
        modules = build(mlp(num_layers=2, width=4))
        large = torch.full((1, 4), 1e6)
        assert modules["layer-0"](large).abs().max() <= 1
        assert modules["layer-1"](large).abs().max() > 1

    def test_one_layer_is_a_model(self) -> None:
        model = mlp(num_layers=1, width=4)
        assert forward(model, build(model), {"inputs": torch.randn(2, 4)}).shape == (2, 4)

    def test_sizes_below_one_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"width must be at least 1 and at most .*, not 0"):
            mlp(width=0)


class TestTwoTowers:
    def test_the_towers_meet_in_the_joint_layer(self) -> None:
        model = two_towers(width=4)
        assert [layer.name for layer in model.layers] == ["left-0", "left-1", "left-2", "right-0", "right-1", "right-2", "joint"]
        assert model.layers[-1].inputs == ("left-2", "right-2")
        assert model.edges() == ((0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6))

    def test_the_output_depends_on_both_towers(self) -> None:
        model = two_towers(num_left_layers=1, num_right_layers=3, width=4)
        modules = build(model)
        left, right = torch.randn(2, 4), torch.randn(2, 4)
        output = forward(model, modules, {"left": left, "right": right})
        assert output.shape == (2, 4)
        assert not torch.allclose(output, forward(model, modules, {"left": left + 1, "right": right}))
        assert not torch.allclose(output, forward(model, modules, {"left": left, "right": right + 1}))

    def test_every_layer_gets_a_gradient_of_the_mean_squared_error(self) -> None:
        model = two_towers(width=4, dtype="float64")
        modules = build(model)
        batch = {field: torch.randn(3, 4, dtype=torch.float64) for field in ("left", "right", "targets")}
        torch.autograd.backward(model.loss(forward(model, modules, batch), batch))
        for name, module in modules.items():
            assert all(parameter.grad is not None and parameter.grad.count_nonzero() for parameter in module.parameters()), name

    def test_a_tower_without_layers_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"num_right_layers must be at least 1 and at most .*, not 0"):
            two_towers(num_right_layers=0)


@pytest.mark.parametrize(
    "model", [gpt(), bert(), mlp(), two_towers(), clip(), vqa()], ids=["gpt", "bert", "mlp", "two_towers", "clip", "vqa"]
)
def test_a_model_and_its_modules_travel_by_pickle(model: Model) -> None:
    copy: Model = pickle.loads(pickle.dumps(model))
    assert [layer.name for layer in copy.layers] == [layer.name for layer in model.layers]
    for (name, module), other in zip(build(model).items(), build(copy).values(), strict=True):
        sent: nn.Module = pickle.loads(pickle.dumps(module))
        for key, value in module.state_dict().items():
            assert torch.equal(sent.state_dict()[key], value), f"{name}.{key}"
            assert torch.equal(other.state_dict()[key], value), f"{name}.{key}"


def test_refusals_of_models_are_the_users_input() -> None:
    with pytest.raises(InputError):
        gpt(d_model=-1)


def test_threads_that_wait_in_place_of_computing_are_woken_in_time() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        pytest.skip("needs Linux")
    slack_ns: list[int] = []

    def wait() -> None:
        slack_ns.append(prctl(30, 0, 0, 0, 0))  # PR_GET_TIMERSLACK
        sleep(0.0)
        slack_ns.append(prctl(30, 0, 0, 0, 0))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert slack_ns[0] > 1
    assert slack_ns[1] == 1
