"""Models with branches that bundled data train: shapes, gradients, what each branch reads, that they learn, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.report import mean_losses, norms_of
from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError, ScheduleError, UnknownNameError
from raypipe.model import Model
from raypipe.models.clip import clip, clip_vit_b_32
from raypipe.models.vqa import vqa, vqa_lxmert
from raypipe.schedules.catalogue import build as build_schedule
from raypipe.schedules.families.branch_aware import ordered
from raypipe.schedules.ir import Schedule, StageGraph
from raypipe.schedules.lower import Placement, check_whole_losses
from raypipe.schedules.passes import evaluation, recompute
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.branches import BranchSearch
from raypipe.schedules.search.dispatch import TimedPipelines
from raypipe.schedules.validate import validate
from tests.actors.oracles import largest_difference, layers_of, train_unsplit
from tests.models.layers import build, forward, gradients, gradients_by_layers, num_parameters
from tests.schedules.handwritten import divided, two_branches

NUM_ROWS = 6


def small_clip(*, dtype: str = "float64") -> Model:
    return clip(num_image_layers=2, num_text_layers=1, image_width=16, text_width=8, head_size=4, embedding_size=12, dtype=dtype)


def small_vqa(*, dtype: str = "float64") -> Model:
    return vqa(width=16, head_size=8, image_size=16, patch_size=4, dtype=dtype)


def glyph_batch(num_rows: int = NUM_ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (num_rows, 32, 32), generator=generator, dtype=torch.uint8)
    return {"glyph": pixels, "name": torch.randint(128, (num_rows, 80), generator=generator, dtype=torch.uint8)}


def question_batch(num_rows: int = NUM_ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "image": torch.randint(256, (num_rows, 16, 16, 3), generator=generator, dtype=torch.uint8),
        "question": torch.randint(27, (num_rows, 9), generator=generator, dtype=torch.uint8),
        "answer": torch.randint(13, (num_rows,), generator=generator),
    }


class ClipAsOne(nn.Module):
    """The towers written as one module, and the loss as its paper has it."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.image = nn.Sequential(*(module for name, module in layers.items() if name.startswith("image")))
        self.text = nn.Sequential(*(module for name, module in layers.items() if name.startswith("text")))
        self.log_scale = layers["joint"].get_parameter("log_scale")

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        image_BE, text_BE = self.image(batch["glyph"]), self.text(batch["name"])
        cosines_BB = functional.cosine_similarity(image_BE.unsqueeze(1), text_BE.unsqueeze(0), dim=-1)
        logits_BB = self.log_scale.exp() * cosines_BB
        losses = [-logits_BB.log_softmax(dim).diagonal().mean() for dim in (0, 1)]
        return (losses[0] + losses[1]) / 2


class VqaAsOne(nn.Module):
    """Both streams written as one module."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        layers = self.layers
        image = layers["image-block-0"](layers["image-embedding"](batch["image"]))
        question = layers["question-block-0"](layers["question-embedding"](batch["question"]))
        for index in (0, 1):
            image, question = layers[f"image-co-{index}"](image, question), layers[f"question-co-{index}"](question, image)
        logits = layers["answer"](image, question)
        chosen: Tensor = logits.log_softmax(-1)[torch.arange(len(logits)), batch["answer"]]
        return -chosen.mean()


CASES = [
    pytest.param(small_clip(), ClipAsOne, glyph_batch(), id="clip"),
    pytest.param(small_vqa(), VqaAsOne, question_batch(), id="vqa"),
]


@pytest.mark.parametrize(("model", "as_one", "batch"), CASES)
def test_gradients_handed_back_from_layer_to_layer_are_those_of_one_module(
    model: Model, as_one: type[nn.Module], batch: dict[str, Tensor]
) -> None:
    modules = build(model)
    loss = as_one(modules)(batch)
    torch.autograd.backward(loss)
    expected = gradients(modules)
    by_layers = gradients_by_layers(model, modules, batch)
    assert by_layers.keys() == expected.keys()
    for name, gradient in by_layers.items():
        assert gradient.count_nonzero(), name
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)
    torch.testing.assert_close(model.loss(forward(model, modules, batch), batch), loss, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Shifted:
    """Rows in which one field is turned by the number of the microbatch."""

    fields: Mapping[str, Tensor]
    turned: str

    def batch(self, microbatch: int, rows: tuple[float, float]) -> dict[str, Tensor]:
        first, end = (round(share * NUM_ROWS) for share in rows)
        return {name: (values.roll(microbatch, 0) if name == self.turned else values)[first:end] for name, values in self.fields.items()}


def trained_as(schedule: Schedule, cut: Cut, model: Model, batches: BatchSource, placement: Placement | None = None) -> LocalPipeline:
    """Checks that losses and weights of two windows on threads are those of the unsplit model."""
    validate(schedule)
    num_microbatches = schedule.num_microbatches
    run = LocalPipeline(
        model,
        cut=cut,
        schedule=schedule,
        batches=batches,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        learning_rate=lambda _: 1e-2,
        max_grad_norm=0.5,
        placement=placement,
    )
    windows = [run.run_window() for _ in range(2)]
    losses = [loss for reports in windows for loss in mean_losses(reports, num_microbatches=num_microbatches)]
    expected = train_unsplit(
        model, batches, num_updates=len(losses), num_microbatches=num_microbatches, learning_rate=1e-2, max_grad_norm=0.5
    )
    assert losses == pytest.approx(expected.losses, abs=1e-10)
    # AdamW would hide gradients that are too large or too small by a factor.
    norms = [norm for reports in windows for _, norm in sorted(norms_of(reports, scope=schedule.update_scope).items())]
    assert norms == pytest.approx(expected.norms, rel=1e-10)
    for index, copies in layers_of(run).items():
        assert all(largest_difference(copy, expected.layers[index]) < 1e-10 for copy in copies)
    return run


PIPELINES = [
    pytest.param(small_clip(), Shifted(glyph_batch(), "name"), ((0, 1), (4,), (2, 3), (5, 6), (7,)), id="clip"),
    pytest.param(small_vqa(), Shifted(question_batch(), "image"), ((0, 1), (2, 3), (4,), (5,), (6, 7, 8)), id="vqa"),
]


@pytest.mark.parametrize(("model", "batches", "stages"), PIPELINES)
def test_branches_side_by_side_train_as_the_unsplit_model(model: Model, batches: Shifted, stages: tuple[tuple[int, ...], ...]) -> None:
    cut = Cut(stages, model.edges())
    trained_as(replace(two_branches(num_updates=2), graph=cut.graph), cut, model, batches)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stages", [((0, 1), (2, 3), (4, 5), (6,), (7,)), ((0,), (1,), (2, 3), (4,), (5,), (6,), (7,))], ids=["d2", "d3"])
def test_branches_on_the_same_devices_train_as_the_unsplit_model(stages: tuple[tuple[int, ...], ...], split: bool) -> None:
    model = small_clip()
    cut = Cut(stages, model.edges())
    schedule = build_schedule("branch-aware", ScheduleRequest(len(stages) // 2, 4, 2, branches=(1, 1), split=split))
    assert set(schedule.graph.edges) == set(cut.graph.edges)
    trained_as(replace(schedule, graph=cut.graph), cut, model, Shifted(glyph_batch(), "name"))


CLIP_STAGES = ((0, 1), (2, 3), (4, 5), (6,), (7,))
"""Two stages of images, two of texts, and the loss."""

VQA_STAGES = ((0, 1), (2, 3), (4,), (5,), (6, 7, 8))
"""Two stages of images, two of questions, which read each other, and the rest."""


@pytest.mark.combined
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("split", [False, True], ids=["whole-backwards", "split-backwards"])
@pytest.mark.parametrize(
    ("stages", "num_parts"),
    [
        pytest.param(CLIP_STAGES, 2, id="d2-halves"),
        pytest.param(CLIP_STAGES, 6, id="d2-single-rows"),
        pytest.param(((0,), (1,), (2, 3), (4,), (5,), (6,), (7,)), 3, id="d3-thirds"),
    ],
)
def test_a_loss_of_all_parts_trains_as_the_unsplit_model(
    stages: tuple[tuple[int, ...], ...], num_parts: int, split: bool, again: bool
) -> None:
    model = small_clip()
    cut = Cut(stages, model.edges())
    schedule = build_schedule("branch-aware", ScheduleRequest(len(stages) // 2, num_parts, 2, branches=(1, 1), split=split, coupled=True))
    if again:
        schedule = recompute(schedule, range(schedule.num_stages))
    trained_as(replace(schedule, graph=cut.graph), cut, model, Shifted(glyph_batch(), "name"))


def placed_order(workers: tuple[int, ...], graph: StageGraph, *, num_parts: int, split: bool, num_updates: int = 2) -> Schedule:
    """The order that is found for four stages of branches and the loss on these workers, with a loss of all parts."""
    times = (*[StageTimes(1.0, 1.0, 1.0)] * 4, StageTimes(0.1, 0.1, 0.1))
    whole_stages = frozenset({4} if num_parts > 1 else ())
    line = TimedPipelines(graph, (workers,), times, splits=split, num_parts=num_parts, whole_stages=whole_stages)
    return ordered(BranchSearch(line, num_microbatches=2, max_held=100.0, most_moved_ops=50_000), num_updates=num_updates)


PLACED = [
    pytest.param((0, 1, 1, 0, 0), id="opposite-with-the-loss-behind-texts"),
    pytest.param((0, 1, 1, 0, 1), id="opposite-with-the-loss-behind-images"),
    pytest.param((0, 1, 0, 1, 1), id="one-direction-with-the-loss-behind-both"),
    pytest.param((0, 1, 0, 1, 0), id="one-direction-with-the-loss-at-the-start"),
    pytest.param((0, 1, 1, 0, 2), id="opposite-with-the-loss-apart"),
    pytest.param((0, 0, 1, 1, 2), id="apart-with-the-loss-apart"),
    pytest.param((0, 0, 0, 0, 0), id="on-one-device"),
]


@pytest.mark.combined
@pytest.mark.parametrize("split", [False, True], ids=["whole-backwards", "split-backwards"])
@pytest.mark.parametrize("workers", PLACED)
def test_a_loss_of_all_parts_may_lie_anywhere(workers: tuple[int, ...], split: bool) -> None:
    model = small_clip()
    cut = Cut(CLIP_STAGES, model.edges())
    schedule = placed_order(workers, cut.graph, num_parts=3, split=split)
    run = trained_as(schedule, cut, model, Shifted(glyph_batch(), "name"))
    whole = evaluation(schedule, num_microbatches=4)
    in_parts = divided(whole, dict.fromkeys(range(4), 3))
    losses = [mean_losses(run.evaluate(order, batches=run.batches), num_microbatches=4) for order in (whole, in_parts)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("split", [False, True], ids=["whole-backwards", "split-backwards"])
def test_replicas_of_branches_share_rows_of_a_loss_on_one_device(num_parts: int, split: bool) -> None:
    model = small_clip()
    cut = Cut(CLIP_STAGES, model.edges())
    placement = Placement((((0, 0.5), (1, 0.5)), ((2, 0.5), (3, 0.5)), ((4, 1.0),)))
    schedule = placed_order((0, 1, 1, 0, 2), cut.graph, num_parts=num_parts, split=split)
    check_whole_losses(schedule, placement)
    run = trained_as(schedule, cut, model, Shifted(glyph_batch(), "name"), placement)
    assert [len(copies) for copies in layers_of(run).values()] == [2] * 7 + [1]


@pytest.mark.combined
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera"])
@pytest.mark.parametrize(("model", "batches", "stages"), PIPELINES)
def test_branches_one_behind_the_other_train_as_the_unsplit_model(
    model: Model, batches: Shifted, stages: tuple[tuple[int, ...], ...], name: str
) -> None:
    cut = Cut.equal(len(model.layers), 4, model.edges())
    schedule = replace(build_schedule(name, ScheduleRequest(4, 4, 2)), graph=cut.graph)
    trained_as(schedule, cut, model, batches)


def test_an_order_that_halves_microbatches_would_change_a_loss_that_couples_rows_and_is_refused() -> None:
    model, batches = small_clip(), Shifted(glyph_batch(), "name")
    cut = Cut.equal(len(model.layers), 4, model.edges())
    schedule = replace(build_schedule("chimera-halving", ScheduleRequest(4, 4)), graph=cut.graph)
    run = LocalPipeline(model, cut=cut, schedule=schedule, batches=batches, optimizer=torch.optim.AdamW, learning_rate=lambda _: 1e-2)
    unsplit = train_unsplit(model, batches, num_updates=1, num_microbatches=4, learning_rate=1e-2, max_grad_norm=1e9)
    assert mean_losses(run.run_window(), num_microbatches=4)[0] < unsplit.losses[0] - 0.1
    assert model.loss_couples_rows
    with pytest.raises(ScheduleError, match="the loss couples the rows"):
        check_whole_losses(schedule, Placement.even(4))


class TestClip:
    def test_branches_run_side_by_side_and_meet_in_the_joint_layer(self) -> None:
        model = clip()
        names = [layer.name for layer in model.layers]
        image, text = ([names[index] for index in model.branches()[branch]] for branch in ("image", "text"))
        assert image == ["image-embedding", "image-block-0", "image-block-1", "image-block-2", "image-head"]
        assert text == ["text-embedding", "text-block-0", "text-block-1", "text-block-2", "text-head"]
        assert {(names[source], names[target]) for source, target in model.edges()} == {
            *((one, two) for branch in (image, text) for one, two in pairwise(branch)),
            ("image-head", "joint"),
            ("text-head", "joint"),
        }

    def test_products_of_the_embeddings_are_cosines_at_the_learned_scale(self) -> None:
        model, batch = small_clip(), glyph_batch()
        output = forward(model, build(model), batch)
        assert output.shape == (NUM_ROWS, 2, 12)
        torch.testing.assert_close(output.square().sum(-1), torch.full((NUM_ROWS, 2), 1 / 0.07, dtype=torch.float64))

    def test_the_scale_stays_below_a_hundred(self) -> None:
        joint = small_clip().layers[-1].build()
        nn.init.constant_(joint.get_parameter("log_scale"), 10.0)
        lengths = joint(*torch.randn(2, 3, 12, dtype=torch.float64)).square().sum(-1)
        torch.testing.assert_close(lengths, torch.full((3, 2), 100.0, dtype=torch.float64))

    def test_an_embedding_depends_on_its_own_field_alone(self) -> None:
        model, batch = small_clip(), glyph_batch()
        modules = build(model)
        before = forward(model, modules, batch)
        other = forward(model, modules, batch | {"name": batch["name"].flip(0)})
        assert torch.equal(other[:, 0], before[:, 0])
        assert not torch.allclose(other[:, 1], before[:, 1])

    def test_the_loss_couples_the_rows_of_a_microbatch(self) -> None:
        model, batch = small_clip(), glyph_batch(8)
        modules = build(model)
        whole = model.loss(forward(model, modules, batch), batch)
        halves = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 4), slice(4, 8))]
        parts = torch.stack([model.loss(forward(model, modules, half), half) for half in halves])
        assert whole > parts.mean() + 0.1

    def test_a_few_steps_learn_which_name_belongs_to_which_glyph(self) -> None:
        model, batch = small_clip(dtype="float32"), glyph_batch(16)
        modules = build(model)
        optimizer = torch.optim.AdamW([weight for module in modules.values() for weight in module.parameters()], lr=3e-3)
        for _ in range(80):
            optimizer.zero_grad()
            torch.autograd.backward(model.loss(forward(model, modules, batch), batch))
            optimizer.step()
        image, text = forward(model, modules, batch).unbind(1)
        assert ((image @ text.T).argmax(1) == torch.arange(16)).all()

    def test_its_published_size_has_151_million_parameters(self) -> None:
        with torch.device("meta"):
            assert num_parameters(build(clip_vit_b_32())) == pytest.approx(151.3e6, rel=0.01)

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"image_width": 100}, "head_size must divide the width: 100 is no multiple of 32"),
            ({"patch_size": 5}, "patch_size must divide image_size: 32 is no multiple of 5"),
            ({"span": 3}, "span must divide sequence_length and width: 80 or 64 is no multiple of 3"),
            ({"num_text_layers": 0}, "num_text_layers must be at least 1 and at most .*, not 0"),
            ({"num_channels": 0}, "num_channels must be at least 1 and at most .*, not 0"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused(self, options: dict[str, int], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            clip(**options)  # type: ignore[arg-type]

    def test_rows_of_another_shape_are_refused(self) -> None:
        modules = build(small_clip())
        with pytest.raises(ConfigError, match=r"the data's images are \[16, 16\], the model's have image_size 32 and num_channels 1"):
            modules["image-embedding"](torch.zeros(1, 16, 16))
        with pytest.raises(ConfigError, match="the data's sequences have 9 tokens, the model's sequence_length is 80"):
            modules["text-embedding"](torch.zeros(1, 9))


class TestVqa:
    def test_each_stream_reads_what_the_other_had_before(self) -> None:
        model = vqa()
        inputs = {layer.name: layer.inputs for layer in model.layers if layer.inputs}
        assert inputs == {
            "image-co-0": ("image-block-0", "question-block-0"),
            "question-co-0": ("question-block-0", "image-block-0"),
            "image-co-1": ("image-co-0", "question-co-0"),
            "question-co-1": ("question-co-0", "image-co-0"),
            "answer": ("image-co-1", "question-co-1"),
        }
        assert [len(members) for members in model.branches().values()] == [4, 4]

    def test_logits_have_a_column_an_answer_and_depend_on_both_fields(self) -> None:
        model, batch = small_vqa(), question_batch()
        modules = build(model)
        logits = forward(model, modules, batch)
        assert logits.shape == (NUM_ROWS, 13)
        for field in ("image", "question"):
            assert not torch.allclose(forward(model, modules, batch | {field: batch[field].flip(0)}), logits)

    def test_an_untrained_model_guesses_evenly_and_its_loss_is_the_mean_over_rows(self) -> None:
        model, batch = small_vqa(), question_batch()
        logits = forward(model, build(model), batch)
        loss = model.loss(logits, batch)
        assert loss.item() == pytest.approx(math.log(13), abs=0.1)
        rows = [model.loss(logits[row : row + 1], {"answer": batch["answer"][row : row + 1]}) for row in range(NUM_ROWS)]
        torch.testing.assert_close(loss, torch.stack(rows).mean())

    def test_a_few_steps_learn_the_answers(self) -> None:
        model, batch = small_vqa(dtype="float32"), question_batch(16)
        modules = build(model)
        optimizer = torch.optim.AdamW([weight for module in modules.values() for weight in module.parameters()], lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            torch.autograd.backward(model.loss(forward(model, modules, batch), batch))
            optimizer.step()
        assert (forward(model, modules, batch).argmax(1) == batch["answer"]).all()

    def test_its_published_size_has_as_many_layers_and_parameters_as_lxmert(self) -> None:
        model = vqa_lxmert()
        assert {branch: len(members) for branch, members in model.branches().items()} == {"image": 1 + 5 + 5, "question": 1 + 9 + 5}
        with torch.device("meta"):
            assert 200e6 < num_parameters(build(model)) < 250e6

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"width": 100}, "head_size must divide the width: 100 is no multiple of 32"),
            ({"num_co_layers": 0}, "num_co_layers must be at least 1 and at most .*, not 0"),
            ({"num_answers": 0}, "num_answers must be at least 1 and at most .*, not 0"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused(self, options: dict[str, int], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            vqa(**options)  # type: ignore[arg-type]

    def test_a_type_that_is_none_is_refused(self) -> None:
        with pytest.raises(UnknownNameError, match="no dtype is called 'float46'"):
            vqa(dtype="float46")


@pytest.mark.parametrize(
    ("model", "batch"), [(small_clip(dtype="bfloat16"), glyph_batch()), (small_vqa(dtype="bfloat16"), question_batch())]
)
def test_the_loss_is_taken_in_float32_at_least(model: Model, batch: dict[str, Tensor]) -> None:
    output = forward(model, build(model), batch)
    assert output.dtype is torch.bfloat16
    assert model.loss(output, batch).dtype is torch.float32
