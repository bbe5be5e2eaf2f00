"""What the planner proposes for the bundled models with branches trains them as the unsplit model."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile, NamedEdge
from raypipe.model import Model
from raypipe.planning import branches
from raypipe.planning.branch_placement import divisions
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.problem import Problem
from raypipe.schedules.lower import check_whole_losses
from raypipe.simulation.simulator import simulate
from tests.models.test_branches import NUM_ROWS, Shifted, glyph_batch, question_batch, small_clip, small_vqa, trained_as
from tests.planning.towers import node


def profile_of(model: Model) -> ModelProfile:
    """Return a profile in which every layer but the one behind the branches takes as long."""
    layers = [
        LayerProfile(
            name=layer.name,
            forward_s=float(layer.branch is not None),
            backward_s=2.0 * (layer.branch is not None),
            weight_grad_s=float(layer.branch is not None),
            output_bytes=8,
            saved_bytes=8,
            parameter_bytes=8,
            branch=layer.branch,
        )
        for layer in model.layers
    ]
    edges = tuple(NamedEdge(producer=layers[source].name, consumer=layers[target].name) for source, target in model.edges())
    return ModelProfile(
        name="model", microbatch_size=NUM_ROWS, layers=tuple(layers), named_edges=edges, loss_couples_rows=model.loss_couples_rows or None
    )


MODELS = [
    pytest.param(small_clip(), Shifted(glyph_batch(), "name"), 1, id="clip-one-group"),
    pytest.param(small_clip(), Shifted(glyph_batch(), "name"), 4, id="clip"),
    pytest.param(small_vqa(), Shifted(question_batch(), "image"), 4, id="vqa"),
]


@pytest.mark.combined
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize(("model", "batches", "num_microbatches"), MODELS)
def test_planned_branches_train_as_the_unsplit_model(model: Model, batches: Shifted, num_microbatches: int, num_devices: int) -> None:
    profile = profile_of(model)
    problem = Problem(profile, node(num_devices), num_microbatches, NUM_ROWS)
    layouts = list(branches.layouts(LayoutEvaluator(problem), tuple((device,) for device in range(num_devices))))
    assert layouts
    for layout in layouts:
        trained_as(layout_schedule(problem, layout, num_updates=2), layout.cut(problem), model, batches)


@pytest.mark.parametrize(("model", "batches", "num_microbatches"), MODELS)
def test_planned_replicas_of_branches_train_as_the_unsplit_model(model: Model, batches: Shifted, num_microbatches: int) -> None:
    """All rows of a coupled loss are gathered on one device; where there is none, nothing is planned."""
    problem = Problem(profile_of(model), node(5), num_microbatches, NUM_ROWS)
    workers = ((0, 1), (2, 3), (4,)) if model.loss_couples_rows else ((0, 1), (2, 3))
    layout = next(iter(branches.layouts(LayoutEvaluator(problem), workers)))
    schedule, placement = layout_schedule(problem, layout, num_updates=2), layout.placement(problem)
    assert placement is not None
    assert max(map(len, placement.workers)) == 2
    if model.loss_couples_rows:
        check_whole_losses(schedule, placement)
        assert not list(branches.layouts(LayoutEvaluator(problem), ((0, 1), (2, 3))))
    trained_as(schedule, layout.cut(problem), model, batches, placement)


@pytest.mark.parametrize(("model", "batches", "num_microbatches"), MODELS)
def test_replicas_that_the_search_chooses_train_as_the_unsplit_model(
    model: Model, batches: Shifted, num_microbatches: int, tmp_path: Path
) -> None:
    evaluator = LayoutEvaluator(Problem(profile_of(model), node(4), num_microbatches, NUM_ROWS))
    layouts = list(branches.replicated_layouts(evaluator, (0, 1, 2, 3)))
    assert layouts
    for number, layout in enumerate(layouts):
        evaluation = evaluator.simulate(layout)
        assert evaluation is not None
        path = tmp_path / f"{number}.json"
        evaluator.plan(evaluation, planner="test", lower_bound_s=0.0).save(path)
        plan = Plan.load(path)
        assert max(map(len, plan.workers)) > 1
        if model.loss_couples_rows:
            check_whole_losses(plan.schedule, plan.placement)
        assert simulate(plan).update_s == pytest.approx(evaluation.update_s)
        trained_as(plan.schedule, plan.cut, model, batches, plan.placement)


def test_a_co_attention_model_is_also_cut_with_layers_of_both_branches_in_a_stage() -> None:
    model = small_vqa()
    problem = Problem(profile_of(model), node(2), 4, NUM_ROWS)
    together = list(divisions(problem))[-1]
    names = [[model.layers[layer].name for layer in layers] for layers in together]
    assert ["image-co-0", "question-co-0", "image-co-1", "question-co-1"] in names
