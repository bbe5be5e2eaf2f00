"""Plans: what fits together, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts.cut import Cut, joined
from raypipe.artifacts.plan import Plan, Predicted, Replica, make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.schedule import ScheduleFile, SizedSchedule, load_schedule, to_json
from raypipe.artifacts.topology import ClusterTopology
from raypipe.errors import FormatError, InputError, PlanError, ScheduleError
from raypipe.planning.balance import balanced_cut
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Schedule, StageGraph
from raypipe.schedules.request import ScheduleRequest
from tests import strategies

PROFILE = ModelProfile.uniform(6, output_bytes=10, saved_bytes=20, parameter_bytes=30)
TOPOLOGY = ClusterTopology.uniform(4, latency_s=0.5)


def plan(name: str = "1f1b", num_stages: int = 3, **more: Any) -> Plan:
    return make_plan(**{
        "name": "small",
        "planner": "balanced",
        "cut": balanced_cut(PROFILE, num_stages),
        "schedule": catalogue.build(name, ScheduleRequest(num_stages, 4, 2)),
        "profile": PROFILE,
        "topology": TOPOLOGY,
        "devices": tuple(device.name for device in TOPOLOGY.devices),
        "microbatch_size": 1,
        **more,
    })


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    plan().save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    edit(content)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    return tmp_path / "plan.json"


# Making


def test_a_plan_puts_workers_on_the_first_devices() -> None:
    made = plan()
    assert made.devices == ("device0", "device1", "device2")
    assert made.stages == (("layer0", "layer1"), ("layer2", "layer3"), ("layer4", "layer5"))
    assert made.schedule == catalogue.build("1f1b", ScheduleRequest(3, 4, 2))
    assert made.cut == balanced_cut(PROFILE, 3)
    assert made.placement.workers == (((0, 1.0),), ((1, 1.0),), ((2, 1.0),))


def test_too_few_devices_are_counted() -> None:
    with pytest.raises(PlanError, match="'1f1b' needs 3 devices, there are 2; add devices or use fewer"):
        plan(devices=("device0", "device1"))


def test_a_device_that_the_topology_does_not_have_is_named_with_the_nearest() -> None:
    with pytest.raises(
        PlanError, match=r"worker 1 is on device 'devise1', which the topology 'uniform' does not have; did you mean 'device1'"
    ):
        plan(devices=("device0", "devise1", "device2"))


def test_a_device_serves_one_worker() -> None:
    with pytest.raises(PlanError, match=r"device 'device0' serves worker 0 and worker 1; give each worker its own"):
        plan(devices=("device0", "device0", "device2"))


def test_stages_and_schedule_must_have_the_same_number() -> None:
    with pytest.raises(PlanError, match="the plan has 2 stages, its schedule 3"):
        plan(cut=balanced_cut(PROFILE, 2))


def test_microbatches_have_at_least_a_row() -> None:
    with pytest.raises(FormatError, match="microbatch_size: expected a number > 0, got 0"):
        plan(microbatch_size=0)


def test_a_layer_that_the_profile_does_not_have_is_named_with_the_nearest() -> None:
    made = plan()
    with pytest.raises(PlanError, match=r"stage 0 has layer 'layr0', which the profile does not; did you mean 'layer0'"):
        replace(made, stages=(("layr0", "layer1"), *made.stages[1:]))


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((("layer0",), ("layer2", "layer3"), ("layer4", "layer5")), "in no stage"),
        ((("layer0", "layer1"), ("layer1", "layer2", "layer3"), ("layer4", "layer5")), "in stage 0 and in stage 1"),
        ((("layer0", "layer1"), (), ("layer2", "layer3", "layer4", "layer5")), "stage 1 has no layers"),
        ((("layer1", "layer0"), ("layer2", "layer3"), ("layer4", "layer5")), "not in ascending order"),
        ((("layer2", "layer3"), ("layer0", "layer1"), ("layer4", "layer5")), "feeds layer 'layer2' in the earlier stage"),
    ],
)
def test_every_layer_has_one_stage_and_none_feeds_an_earlier_one(stages: tuple[tuple[str, ...], ...], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        replace(plan(), stages=stages)


def test_the_stage_graph_of_the_schedule_must_be_that_of_the_layers() -> None:
    made = plan()
    with pytest.raises(PlanError, match=r"the layers of the stages make the edges \[\(0, 1\), \(1, 2\)\], the schedule has \[\(0, 2\)\]"):
        replace(made, schedule=replace(made.schedule, graph=StageGraph(3, ((0, 2),))))


def test_the_ties_of_the_schedule_must_be_those_of_the_layers() -> None:
    made = plan()
    with pytest.raises(PlanError, match=r"ties the stages \[\], its schedule \[\(0, 2\)\]; plan again"):
        replace(made, schedule=replace(made.schedule, graph=replace(made.schedule.graph, ties=((0, 2),))))


def test_layers_that_share_weights_through_others_are_one_group() -> None:
    assert joined([(0, 5), (1, 4), (5, 2), (3, 3)]) == {(0, 2, 5), (1, 4)}


def test_all_stages_that_share_weights_are_one_tie() -> None:
    edges = tuple((layer, layer + 1) for layer in range(7))
    cut = Cut.equal(8, 4, edges, ((0, 7), (1, 2), (4, 5)))
    assert cut.graph.ties == ((0, 1, 3),)
    assert cut.parted_ties == (0, 1)
    assert Cut.equal(8, 1, edges, ((0, 7),)).graph.ties == ()


def test_the_shares_of_a_worker_sum_to_one() -> None:
    workers = ((Replica(device="device0", share=0.5), Replica(device="device3", share=0.4)), *plan().workers[1:])
    with pytest.raises(PlanError, match="the shares of its devices must sum to 1"):
        replace(plan(), workers=workers)


# Files


@pytest.mark.parametrize("name", [spec.name for spec in catalogue.SPECS if spec.name != strategies.BRANCHED])
def test_a_saved_plan_is_read_back_as_it_was(tmp_path: Path, name: str) -> None:
    schedule = catalogue.build(name, strategies.near(name, 3, 4, 2))
    made = plan(cut=balanced_cut(PROFILE, schedule.num_stages), schedule=schedule)
    made = replace(made, predicted=Predicted(update_s=1.5, bubble_ratio=0.25, device_bubble_ratios=(0.1,), peak_memory_bytes=(7,)))
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert loaded.schedule == made.schedule


def test_a_plan_whose_profile_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda content: content["profile"]["layers"][0].update(forward_s=9.0))
    with pytest.raises(FormatError, match=r"profile_digest: the profile was changed since the plan was made .* plan again"):
        Plan.load(path)


def test_a_plan_whose_topology_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda content: content["topology"]["default_link"].update(latency_s=9.0))
    with pytest.raises(FormatError, match="topology_digest: the topology was changed"):
        Plan.load(path)


def test_a_plan_without_digests_may_be_changed(tmp_path: Path) -> None:
    def edit(content: dict[str, Any]) -> None:
        content["profile"]["layers"][0]["forward_s"] = 9.0
        del content["profile_digest"]

    assert Plan.load(edited(tmp_path, edit)).profile.layers[0].forward_s == 9.0


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda content: content["workers"][0][0].update(device="device9"), "worker 0 is on device 'device9'"),
        (lambda content: content["workers"].pop(), "the plan has 2 workers, its schedule 3"),
        (lambda content: content["schedule"]["programs"][0].pop(0), "worker 0 has no 0F0"),
        (lambda content: content["schedule"]["programs"][0].insert(0, "0Q0"), "'0Q0' is no Op"),
        (lambda content: content["schedule"].update(num_stages=10**15), "the plan has 3 stages"),
        (lambda content: content["schedule"].update(num_microbatches=10**15), "microbatch"),
        (lambda content: content.update(microbatchsize=3), "unknown key; did you mean 'microbatch_size'"),
        (lambda content: content.pop("stages"), "this key is missing"),
        (lambda content: content["profile"]["layers"][2].update(backward_s=-1.0), r"profile.layers\[2\].backward_s"),
    ],
)
def test_a_malformed_plan_is_refused_with_its_place(tmp_path: Path, edit: Callable[[dict[str, Any]], object], problem: str) -> None:
    path = edited(tmp_path, edit)
    with pytest.raises(FormatError, match=problem) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(str(path))


# Schedules as files


@pytest.mark.parametrize("name", sorted(strategies.HANDWRITTEN))
def test_a_saved_schedule_is_read_back_as_it_was(tmp_path: Path, name: str) -> None:
    schedule = strategies.HANDWRITTEN[name]()
    (tmp_path / "schedule.json").write_text(to_json(schedule))
    assert load_schedule(tmp_path / "schedule.json") == SizedSchedule(schedule)


def test_a_file_with_coupled_microbatches_says_how_they_are_written_now(tmp_path: Path) -> None:
    text = to_json(catalogue.build("1f1b", ScheduleRequest(2, 2)))
    assert '"loss_group_size": 1' in text
    (tmp_path / "old.json").write_text(text.replace('"loss_group_size": 1', '"loss_group_size": 2'))
    with pytest.raises(ScheduleError, match=r"old\.json: loss_group_size 2 .* branch-aware --coupled"):
        load_schedule(tmp_path / "old.json")


@pytest.mark.parametrize("work", [(1.0,), (1.0, -1.0)])
def test_work_that_stages_cannot_have_is_refused(tmp_path: Path, work: tuple[float, ...]) -> None:
    (tmp_path / "sized.json").write_text(to_json(catalogue.build("1f1b", ScheduleRequest(2, 2)), work))
    with pytest.raises(ScheduleError, match=r"sized\.json: work .* each of 2 stages"):
        load_schedule(tmp_path / "sized.json")


def test_the_file_form_of_a_schedule_is_text() -> None:
    schedule: Schedule = catalogue.build("gpipe", ScheduleRequest(1, 2))
    assert ScheduleFile.of(schedule).programs == (("0F0", "0F1", "0B0", "0B1", "0U0"),)


def test_a_schedule_that_cannot_run_is_refused_with_its_file_and_grid(tmp_path: Path) -> None:
    schedule = catalogue.build("gpipe", ScheduleRequest(1, 2))
    (tmp_path / "backwards.json").write_text(to_json(replace(schedule, programs=(schedule.programs[0][::-1],))))
    with pytest.raises(ScheduleError, match=r"backwards\.json: worker 0, position") as caught:
        load_schedule(tmp_path / "backwards.json")
    assert ">0" in caught.value.grid


# Cuts


def test_the_edges_of_stages_name_the_layers_that_cross() -> None:
    cut = Cut(((0, 1), (2,), (3,)), ((0, 1), (1, 2), (0, 3), (1, 3), (2, 3)))
    assert cut.crossing == {(0, 1): (1,), (0, 2): (0, 1), (1, 2): (2,)}
    assert cut.graph.edges == ((0, 1), (0, 2), (1, 2))
    assert cut.stage_of == (0, 0, 1, 2)


def test_an_equal_cut_has_stages_that_differ_by_one_layer_at_most() -> None:
    assert [len(stage) for stage in Cut.equal(7, 3, ()).stages] == [3, 2, 2]
    with pytest.raises(PlanError, match="2 layers cannot be cut into 3 stages"):
        Cut.equal(2, 3, ())


def test_stages_that_wait_for_each_other_are_refused_with_where_to_cut() -> None:
    # Two branches of two layers, whose second layers also read the other's first.
    edges = ((0, 2), (1, 2), (1, 3), (0, 3))
    names = ("image-0", "text-0", "image-1", "text-1")
    with pytest.raises(PlanError) as caught:
        Cut(((0, 2), (1, 3)), edges, names=names)
    assert str(caught.value) == (
        "the stages 0 -> 1 -> 0 wait for each other: layer 'text-0' of stage 1 feeds stage 0, and layer 'text-1' of stage 1 reads stage 0; "
        "cut stage 1 between these layers"
    )
    assert Cut(((0,), (1, 3), (2,)), edges, names=names).graph.edges == ((0, 1), (0, 2), (1, 2))
    with pytest.raises(
        PlanError, match="layer 'image-0' in stage 1 feeds layer 'text-1' in the earlier stage 0; number the stages in topol"
    ):
        Cut(((1, 3), (0,), (2,)), edges, names=names)


def test_every_error_of_a_plan_is_an_input_error() -> None:
    assert issubclass(PlanError, InputError)
