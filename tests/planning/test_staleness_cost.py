"""Plans are chosen for seconds to the same loss: seconds of an update times the updates that late gradients cost an optimizer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from staleness_cost import left_by_start, points

from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Overheads
from raypipe.config import DataConfig, ModelConfig, OptimizerConfig, OptimizerName, RunConfig, ScheduleConfig, TrainConfig
from raypipe.errors import PlanError
from raypipe.planning import staleness_cost
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.extrapolation import ShortEvaluator, evaluator_of
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.merged import MergedEvaluator
from raypipe.planning.plan import plan
from raypipe.planning.problem import Problem
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import best_division
from raypipe.planning.staleness_cost import (
    LEFT_BY_START,
    MEASURED,
    MEASURED_START,
    NO_START,
    both_halves,
    known_optimizer,
    more_updates,
    stand_in,
    window_delay,
)
from raypipe.schedules.catalogue import build
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest

NUM_DEVICES = 4


def profile() -> ModelProfile:
    return ModelProfile.uniform(8, forward_s=0.01, backward_s=0.02, output_bytes=1000)


def cluster() -> ClusterTopology:
    return ClusterTopology.uniform(NUM_DEVICES, devices_per_node=4, latency_s=1e-5, bandwidth_bytes_per_s=1e10)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizers: delay costs one nothing and the other as many updates again."""
    measured = {"careless": ((0.0, 1.0), (1.0, 1.0)), OptimizerName.NADAMW.value: ((0.0, 1.0), (0.5, 1.5), (1.0, 3.0))}
    monkeypatch.setattr(staleness_cost, "MEASURED", measured)


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize(("mean_delay", "expected"), [(0.0, 1.0), (0.25, 1.25), (0.5, 1.5), (0.75, 2.25), (2.0, 6.0)])
def test_between_measured_points_are_straight_lines(mean_delay: float, expected: float) -> None:
    assert more_updates("nadamw", mean_delay) == pytest.approx(expected)
    assert more_updates("unheard-of", mean_delay) == pytest.approx(expected), "others pay as NAdamW"


def test_measured_costs_start_at_one_and_never_fall() -> None:
    for measured in MEASURED.values():
        assert measured[0] == (0.0, 1.0)
        assert list(measured) == sorted(measured)
        assert [more for _, more in measured] == sorted(more for _, more in measured)


@pytest.mark.parametrize("optimizer", MEASURED)
def test_the_costs_are_those_of_the_runs(optimizer: str) -> None:
    found = [(round(point.mean_delay, 2), round(point.more_updates, 2)) for point in points(optimizer)]
    assert list(MEASURED[optimizer][1:]) == found
    assert LEFT_BY_START[optimizer] == round(left_by_start(optimizer), 2)


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (OptimizerConfig(name="muon", gradient_correction=1.0), "muon"),
        (OptimizerConfig(name="muon"), "nadamw"),
        (OptimizerConfig(name="nadamw"), "nadamw"),
        (OptimizerConfig(name="adamw"), "nadamw"),
        (OptimizerConfig(name="torch.optim.SGD"), "nadamw"),
    ],
)
def test_an_optimizer_that_was_not_measured_pays_as_nadamw(config: OptimizerConfig, known: str) -> None:
    assert known_optimizer(config) == known


@pytest.mark.parametrize(
    ("order", "num_microbatches", "window"),
    [
        ("pipedream-2bw", 8, 2),
        ("pipedream-2bw", 8, 20),
        ("async-1f1b", 2, 4),
        ("async-1f1b", 2, 40),
        ("async-1f1b", 8, 12),
        ("amdp", 8, 12),
    ],
)
def test_a_layout_pays_for_the_mean_delay_of_its_window(order: str, num_microbatches: int, window: int) -> None:
    """With fewer microbatches than stages, gradients are late by several updates, and each of the first updates is later than the last."""
    topology = ClusterTopology.uniform(8, devices_per_node=8, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    problem = Problem(profile(), topology, num_microbatches, 1, updates_per_window=window, optimizer="nadamw")
    layout = Layout(tuple(range(9)), tuple((device,) for device in range(8)), order)
    found = LayoutEvaluator(problem).simulate(layout)
    assert found is not None
    assert found.mean_delay == pytest.approx(metrics(layout_schedule(problem, layout, num_updates=window)).mean_delay)
    assert found.more_updates == more_updates("nadamw", found.mean_delay)


def test_updates_that_are_not_equally_late_do_not_stand_for_a_window() -> None:
    filling = build("async-1f1b", ScheduleRequest(8, 2, 4))
    assert window_delay(filling, 40) is None
    assert window_delay(filling, 4) == metrics(filling).mean_delay


@pytest.mark.usefixtures("costs")
def test_a_late_layout_ranks_by_its_seconds_to_the_same_loss() -> None:
    problem = Problem(profile(), cluster(), num_microbatches=8, microbatch_size=1, max_staleness=1)
    layout = Layout((0, 2, 4, 6, 8), tuple((device,) for device in range(NUM_DEVICES)), "pipedream-2bw")
    without = evaluator_of(problem).simulate(layout)
    paid = evaluator_of(replace(problem, optimizer="nadamw")).simulate(layout)
    assert without is not None
    assert paid is not None
    assert without.loss_s == without.update_s == paid.update_s
    assert paid.mean_delay == pytest.approx(0.9), "of 10 updates, the first has nothing late"
    assert paid.more_updates == pytest.approx(2.7)
    assert paid.rank == (0.0, paid.loss_s)
    assert paid.loss_s == pytest.approx(2.7 * paid.update_s)


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize("order", ["pipedream-2bw", "async-1f1b"])
@pytest.mark.parametrize("devices_per_worker", [1, 2])
def test_short_updates_and_merged_workers_pay_as_the_whole_update_does(order: str, devices_per_worker: int) -> None:
    topology = ClusterTopology.uniform(8, devices_per_node=8, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    problem = Problem(profile(), topology, num_microbatches=256, microbatch_size=4, optimizer="nadamw")
    groups = tuple(tuple(range(first, first + devices_per_worker)) for first in range(0, 4 * devices_per_worker, devices_per_worker))
    layout = Layout((0, 2, 4, 6, 8), groups, order)
    evaluator = LayoutEvaluator(problem)
    short = ShortEvaluator.of(evaluator)
    assert short is not None
    assert short.merges
    assert short.lengths(layout) is not None
    whole = evaluator.simulate(layout)
    assert whole is not None
    assert whole.mean_delay > 0
    for found in (short.simulate(layout), MergedEvaluator(problem).simulate(layout)):
        assert found is not None
        assert found.mean_delay == pytest.approx(whole.mean_delay)
        assert found.more_updates == pytest.approx(whole.more_updates)
        assert found.loss_s == pytest.approx(whole.loss_s, rel=0.02)


@pytest.mark.usefixtures("costs")
def test_auto_is_late_only_with_an_optimizer_that_bears_it() -> None:
    chosen = {
        optimizer: plan(profile(), cluster(), 4, microbatch_size=1, max_staleness=1, optimizer=optimizer, effort=0.1)
        for optimizer in (None, "careless", "nadamw")
    }
    seconds = {optimizer: found.predicted.update_s for optimizer, found in chosen.items() if found.predicted}
    assert chosen[None].schedule.weight_rule.overlaps_updates
    assert chosen["careless"].schedule.weight_rule.overlaps_updates
    assert seconds["careless"] <= seconds["nadamw"]
    delays = {optimizer: metrics(found.schedule).mean_delay for optimizer, found in chosen.items()}
    assert delays["nadamw"] < delays["careless"]
    paid = {optimizer: seconds[optimizer] * more_updates("nadamw", delays[optimizer]) for optimizer in ("careless", "nadamw")}
    assert paid["nadamw"] < paid["careless"]


@pytest.mark.usefixtures("costs")
def test_rounds_are_chosen_for_the_loss_too() -> None:
    """More microbatches make fewer gradients late; an overhead for each makes them slow. Sums of replicas take too long for these."""
    layer = LayerProfile(
        name="layer",
        forward_s=0.08,
        backward_s=0.16,
        weight_grad_s=0.08,
        output_bytes=8000,
        saved_bytes=8000,
        parameter_bytes=1_000_000_000,
    )
    model = ModelProfile(name="model", microbatch_size=64, layers=tuple(replace(layer, name=f"layer-{at}") for at in range(8)))
    topology = replace(cluster(), overheads=Overheads(forward_s=0.005, backward_s=0.005))
    problem = Problem(model, topology, num_microbatches=1, microbatch_size=64, max_staleness=1)
    (careless, fast), (careful, found) = (
        best_division(replace(problem, optimizer=optimizer), schedule="async-1f1b", budget=SearchBudget.usual(problem, effort=0.1))
        for optimizer in ("careless", "nadamw")
    )
    assert careful.num_microbatches > careless.num_microbatches
    assert found.mean_delay < fast.mean_delay
    assert found.update_s > fast.update_s
    assert found.loss_s < fast.update_s * more_updates("nadamw", fast.mean_delay)


@pytest.mark.parametrize("optimizer", MEASURED)
def test_a_start_on_time_leaves_a_part_of_the_cost(optimizer: str) -> None:
    more = {share: more_updates(optimizer, 0.5, share) for share in (0.0, NO_START, 0.15, MEASURED_START, 0.6, 1.0)}
    assert more[0.0] == more[NO_START] > more[0.15] > more[MEASURED_START] > more[0.6] > more[1.0] == 1
    assert math.log(more[MEASURED_START]) == pytest.approx(LEFT_BY_START[optimizer] * math.log(more[0.0]))
    assert more_updates(optimizer, 0.0, MEASURED_START) == 1


@pytest.mark.parametrize(("order", "num_microbatches"), [("pipedream-2bw", 8), ("async-1f1b", 8), ("amdp", 8), ("amdp", 32)])
def test_updates_at_the_start_take_what_a_window_of_one_update_takes(order: str, num_microbatches: int) -> None:
    topology = ClusterTopology.uniform(8, devices_per_node=8, latency_s=0.0, bandwidth_bytes_per_s=1e15)
    problem = Problem(profile(), topology, num_microbatches, 1, updates_per_window=20, optimizer="nadamw")
    layout = Layout(tuple(range(9)), tuple((device,) for device in range(8)), order)
    late, drained, half = (
        LayoutEvaluator(replace(problem, **changes)).simulate(layout)
        for changes in ({}, {"updates_per_window": 1}, {"synchronous_share": 0.5})
    )
    assert late is not None
    assert drained is not None
    assert half is not None
    assert drained.mean_delay == 0
    assert late.update_s < drained.update_s
    assert half.update_s == late.update_s
    assert half.mean_update_s == pytest.approx((late.update_s + drained.update_s) / 2, rel=0.01)
    assert half.loss_s == half.mean_update_s * more_updates("nadamw", late.mean_delay, 0.5)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_of_the_updates_is_from_0_to_1(share: float) -> None:
    with pytest.raises(PlanError, match="synchronous_share"):
        Problem(profile(), cluster(), num_microbatches=8, microbatch_size=1, synchronous_share=share)


def test_the_share_on_time_is_that_of_the_run() -> None:
    def config(synchronous_updates: int) -> TrainConfig:
        return TrainConfig(
            model=ModelConfig(function="raypipe.models.gpt:gpt"),
            data=DataConfig(path="tokens.parquet"),
            schedule=ScheduleConfig(synchronous_updates=synchronous_updates),
            run=RunConfig(num_updates=20),
        )

    assert [config(number).synchronous_share for number in (0, 5, 20, 30)] == [0, 0.25, 1, 1]


def test_the_line_names_a_start_on_time_where_it_saves_more_than_it_takes() -> None:
    def line(share: float, more_s: float | None) -> str:
        return both_halves(0.5, 1.0, "nadamw", share, more_s)

    assert "schedule.synchronous_updates at 20%" in line(0.0, 0.01)
    assert f"{more_updates('nadamw', 1.0, MEASURED_START) - 1:.1%} and 502 ms" in line(0.0, 0.01)
    assert "synchronous_updates" not in line(0.0, 100.0), "a drain takes longer than it saves"
    assert "synchronous_updates" not in line(0.0, None), "what a drain takes is not known"
    assert "synchronous_updates" not in line(MEASURED_START, 0.01)
    assert "502 ms an update" in line(MEASURED_START, 0.01)
    assert "behind the first 20% of the updates" in line(MEASURED_START, 0.01)


def test_the_line_says_both_halves() -> None:
    text = both_halves(0.5, 0.25, "muon")
    assert "500 ms an update" in text
    assert "0.25 updates late on average, " in text
    assert f"{more_updates('muon', 0.25) - 1:.1%} more updates" in text


def test_the_line_names_what_stands_for_an_optimizer_that_was_not_measured() -> None:
    assert "an optimizer like nadamw takes" in both_halves(0.5, 0.25, "lion")
    assert "'lion' as many updates as nadamw" in stand_in("lion")


@pytest.mark.parametrize("optimizer", MEASURED)
def test_nothing_stands_for_an_optimizer_that_was_measured(optimizer: str) -> None:
    assert stand_in(optimizer) == ""


@pytest.mark.parametrize(
    ("optimizer", "mean_delay", "how"),
    [
        ("muon", 0.05, "interpolated"),
        ("muon", 0.5, "interpolated"),
        ("muon", 1.0, ""),
        ("nadamw", 0.25, ""),
        ("nadamw", 3.0, "extrapolated"),
    ],
)
def test_the_line_says_where_no_delay_nearby_was_measured(optimizer: str, mean_delay: float, how: str) -> None:
    text = both_halves(0.5, mean_delay, optimizer)
    assert text.endswith(f"({how}, not measured)") if how else "not measured" not in text
