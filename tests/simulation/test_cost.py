"""Seconds and bytes of Ops, messages and collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, Replica, make_plan
from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, Path
from raypipe.communication.patterns import ring
from raypipe.planning.problem import Problem
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Op, OpKind, Schedule
from raypipe.schedules.lower import Direction, Message
from raypipe.schedules.passes import over_graph, shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.cost import Cost, LayerCost, StageCost
from raypipe.simulation.memory import activation_bytes, standing_bytes, working_bytes
from raypipe.simulation.plan_cost import equal_stages, plan_cost
from raypipe.simulation.simulator import simulate
from tests.schedules import handwritten

STAGE = StageCost(
    forward_s=3.0,
    backward_s=7.0,
    weight_grad_s=2.0,
    update_s=0.5,
    saved_bytes=100,
    weight_grad_saved_bytes=30,
    parameter_bytes=1000,
    state_bytes=2000,
    gradient_bytes=1000,
    working_bytes=50,
    input_grad_working_bytes=70,
)


def cost(path: Path | None = None, num_devices: int = 4) -> Cost:
    link = path or Path()
    return Cost(
        devices=tuple(map(str, range(num_devices))),
        stages={(device, device): STAGE for device in range(num_devices)},
        edge_bytes={(0, 1): 80},
        path=lambda source, target: Path() if source == target else link,
    )


def around(known: Cost, num_members: int) -> Cost:
    """The cost with sums of the first devices in a ring in their order."""
    members = tuple(range(num_members))
    return replace(known, patterns={members: ring(members)})


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        (OpKind.FORWARD, 3.0),
        (OpKind.RECOMPUTE, 3.0),
        (OpKind.BACKWARD, 7.0),
        (OpKind.INPUT_GRADIENT, 5.0),
        (OpKind.WEIGHT_GRADIENT, 2.0),
        (OpKind.UPDATE, 0.5),
    ],
)
def test_each_kind_of_op_has_its_time(kind: OpKind, seconds: float) -> None:
    assert cost().compute_s(0, (Op(kind, 0, 0),)) == seconds


def test_input_and_weight_gradient_take_together_what_the_backward_takes() -> None:
    parts = sum(cost().compute_s(0, (Op(kind, 0, 0),)) for kind in (OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT))
    assert parts == cost().compute_s(0, (Op(OpKind.BACKWARD, 0, 0),))


def test_a_share_of_the_rows_takes_its_share_of_the_time_and_an_update_all_of_it() -> None:
    assert cost().compute_s(0, (Op(OpKind.FORWARD, 0, 0),), (0.25,)) == 0.75
    assert cost().compute_s(0, (Op(OpKind.UPDATE, 0, 0),), (0.25,)) == 0.5


def test_ops_that_overlap_take_their_sum_unless_told_otherwise() -> None:
    both = (Op(OpKind.FORWARD, 0, 1), Op(OpKind.BACKWARD, 0, 0))
    assert cost().compute_s(0, both) == 10.0
    assert replace(cost(), overlap_s=max).compute_s(0, both) == 7.0


def test_a_message_has_the_bytes_of_its_rows_in_both_directions() -> None:
    forward = Message(Direction.ACTIVATION, 0, 1, 0)
    assert cost().message_bytes(forward) == 80
    assert cost().message_bytes(Message(Direction.GRADIENT, 1, 0, 0)) == 80
    assert cost().message_bytes(forward._replace(rows=(0.25, 0.5))) == 20
    assert cost().message_bytes(Message(Direction.ACTIVATION, 1, 2, 0)) == 0


def test_the_parts_of_a_message_have_all_its_bytes() -> None:
    thirds = [(0.0, 1 / 4), (1 / 4, 1 / 2), (1 / 2, 1.0)]
    assert sum(cost().message_bytes(Message(Direction.ACTIVATION, 0, 1, 0, rows=rows)) for rows in thirds) == 80


def test_a_ring_takes_two_steps_less_than_twice_its_members() -> None:
    collective = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1, 2, 3))
    path = Path(latency_s=0.5, bandwidth_bytes_per_s=100.0)
    # 2 (4 - 1) steps of a quarter of 1000 bytes.
    assert around(cost(path), 4).collective_s(collective) == 6 * (0.5 + 2.5)
    assert cost(path).collective_bytes(collective) == 1000


def test_the_slowest_link_of_a_ring_sets_its_pace() -> None:
    def path(source: int, target: int) -> Path:
        return Path(0.0, 10.0 if (source, target) == (2, 0) else 100.0, port=f"the port of {source}")

    collective = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1, 2))
    slow = replace(cost(), path=path)
    assert around(slow, 3).collective_s(collective) == pytest.approx(4 * 1000 / 3 / 10)
    assert slow.collective_s(collective) == pytest.approx(4 * 1000 / 3 / 100), "the ring goes the other way round"


def test_links_of_a_ring_share_what_they_pass_through() -> None:
    collective = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1, 2, 3))
    shared = Path(0.0, 100.0, (("root", 100.0),))
    assert replace(cost(), path=lambda _source, _target: shared).collective_s(collective) == pytest.approx(6 * 4 * 250 / 100)
    nodes = tuple(
        Node(
            name=name,
            devices=(Device(f"{name}0", "gpu"), Device(f"{name}1", "gpu")),
            link=NodeLink(latency_s=0.0, bandwidth_bytes_per_s=1e6),
        )
        for name in "ab"
    )
    topology = ClusterTopology(name="t", nodes=nodes, links=(Link(source="a", target="b", latency_s=0.0, bandwidth_bytes_per_s=100.0),))

    def on(*names: str) -> Cost:
        return replace(
            cost(), nodes=tuple(name[0] for name in names), path=lambda source, target: topology.path(names[source], names[target])
        )

    one, other = on("a0", "b0", "a1", "b1"), on("a0", "a1", "b0", "b1")
    one_s, other_s = around(one, 4).collective_s(collective), around(other, 4).collective_s(collective)
    assert one_s == pytest.approx(2 * other_s)
    # With two levels, which are chosen, the order does not matter, and each pair of nodes exchanges all bytes once.
    assert one.collective_s(collective) == pytest.approx(other.collective_s(collective))
    assert other_s / other.collective_s(collective) == pytest.approx(1.5, rel=0.001)


def test_a_norm_takes_the_longest_latency() -> None:
    collective = Collective(CollectiveKind.NORM, 0, 0, 0, (0, 1, 2))
    assert cost(Path(0.5, 1.0)).collective_s(collective) == 0.5
    assert cost().collective_bytes(collective) == 8
    # Every member sends to every other, neighbors or not.
    far = replace(cost(), path=lambda source, target: Path(9.0 if (source, target) == (3, 1) else 0.5))
    assert far.collective_s(replace(collective, devices=(0, 1, 2, 3))) == 9.0


def test_the_sum_of_a_tie_has_the_bytes_of_the_shared_weights_alone() -> None:
    collective = Collective(CollectiveKind.TIED, 0, 0, 0, (0, 3))
    path = Path(latency_s=0.5, bandwidth_bytes_per_s=100.0)
    known = replace(cost(path), tied_bytes={0: 300})
    assert known.collective_bytes(collective) == 300
    assert known.collective_s(collective) == 2 * (0.5 + 1.5)
    # Of a shape without sizes it is one hop, as a norm is.
    assert cost(path).collective_s(collective) == 0.5
    assert known.collective_s(replace(collective, kind=CollectiveKind.TIED_NORM)) == 0.5


def test_a_member_alone_waits_for_nobody() -> None:
    assert cost(Path(0.5, 1.0)).collective_s(Collective(CollectiveKind.NORM, 0, 0, 0, (1,))) == 0.0
    assert cost(Path(0.5, 1.0)).collective_s(Collective(CollectiveKind.GRADIENTS, 1, 0, 0, (1,))) == 0.0


def test_activations_are_held_from_forward_to_backward_or_weight_gradient() -> None:
    def step(kind: OpKind, share: float = 1.0) -> tuple[int, int]:
        return activation_bytes(cost(), 0, Op(kind, 0, 0), share)

    assert step(OpKind.FORWARD) == (100, 0)
    assert step(OpKind.BACKWARD) == (0, 100)
    assert step(OpKind.INPUT_GRADIENT) == (0, 70)
    assert step(OpKind.WEIGHT_GRADIENT) == (0, 30)
    assert step(OpKind.UPDATE) == (0, 0)
    # Whatever the share, what was taken is freed.
    for share in (0.333, 0.123):
        assert step(OpKind.FORWARD, share)[0] == step(OpKind.INPUT_GRADIENT, share)[1] + step(OpKind.WEIGHT_GRADIENT, share)[1]


def test_an_op_needs_memory_while_it_runs() -> None:
    def working(kind: OpKind, share: float = 1.0) -> int:
        return working_bytes(cost(), 0, Op(kind, 0, 0), share)

    assert working(OpKind.FORWARD) == working(OpKind.BACKWARD) == working(OpKind.WEIGHT_GRADIENT) == 50
    assert working(OpKind.BACKWARD, 0.5) == 25
    assert working(OpKind.INPUT_GRADIENT) == 70
    assert working(OpKind.UPDATE) == 0


def test_a_device_always_holds_its_weights_in_all_versions_and_their_state() -> None:
    assert standing_bytes(cost(), 0) == 3000
    assert standing_bytes(replace(cost(), weight_versions={0: 2.0}), 0) == 4000
    two_stages = replace(cost(), stages={(0, 0): STAGE, (0, 4): STAGE})
    assert standing_bytes(two_stages, 0) == 6000
    assert standing_bytes(two_stages, 1) == 0


def test_equal_stages_have_a_pure_delay_between_devices() -> None:
    schedule = catalogue.build("interleaved", ScheduleRequest(2, 2, num_chunks=2))
    found = equal_stages(schedule, forward_s=2, backward_s=5, weight_grad_s=3, latency_s=0.5)
    assert sorted(found.stages) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert found.compute_s(1, (Op(OpKind.INPUT_GRADIENT, 3, 0),)) == 2
    assert found.path(0, 1) == Path(0.5, float("inf"), ())
    assert found.path(1, 1).latency_s == 0.0


# Plans


def layer(name: str, *, forward_s: float = 1.0, output_bytes: int = 8, update_s: float | None = None) -> LayerProfile:
    return LayerProfile(
        name=name,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        weight_grad_s=forward_s,
        output_bytes=output_bytes,
        saved_bytes=40,
        parameter_bytes=100,
        update_s=update_s,
    )


def plan(profile: ModelProfile, topology: ClusterTopology, stages: tuple[tuple[int, ...], ...], *, microbatch_size: int = 2) -> Plan:
    edges = tuple((edge.producer, edge.consumer) for edge in profile.edges())
    cut = Cut(stages, edges, profile.ties())
    schedule: Schedule = catalogue.build("gpipe", ScheduleRequest(len(stages), 2))
    return make_plan(
        name="small",
        planner="by hand",
        cut=cut,
        schedule=over_graph(schedule, cut.graph),
        profile=profile,
        topology=topology,
        devices=tuple(device.name for device in topology.devices),
        microbatch_size=microbatch_size,
    )


def test_a_stage_costs_what_its_layers_cost_scaled_to_the_microbatch() -> None:
    profile = ModelProfile(name="m", microbatch_size=2, layers=(layer("a", forward_s=1), layer("b", forward_s=3), layer("c", forward_s=5)))
    found = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0, 1), (2,)), microbatch_size=4)).stages
    layers = (LayerCost(100, 0, 4, 2), LayerCost(100, 0, 12, 6))
    assert found[0, 0] == StageCost(8, 16, 8, 0.0, 160, 160, 200, 400, gradient_bytes=200, layers=layers)
    (layer_c,) = found[1, 1].layers
    assert found[1, 1] == StageCost(10, 20, 10, 0.0, 80, 80, 100, 200, gradient_bytes=100, layers=(layer_c,))
    assert layer_c == LayerCost(100, 0, 20, 10)


def test_a_bucket_has_the_bytes_of_its_layers_and_is_complete_when_the_backward_has_passed_them() -> None:
    layers = (LayerCost(40, 30, 6.0, 2.0), LayerCost(0, 0, 1.0, 0.5), LayerCost(30, 0, 2.0, 1.0), LayerCost(30, 0, 1.0, 0.5))
    stage = StageCost(5, 10, 4, parameter_bytes=100, untouched_bytes=30, layers=layers)
    assert [stage.bucket_bytes(part, 2) for part in (1, 2)] == [60, 10]
    assert stage.ready(OpKind.BACKWARD, 2) == pytest.approx([0.3, 1.0])
    assert stage.ready(OpKind.WEIGHT_GRADIENT, 2) == pytest.approx([1.5 / 4, 1.0])
    assert stage.bucket_bytes(0, 1) == 70
    alike = replace(stage, layers=())
    assert [alike.bucket_bytes(part, 2) for part in (1, 2)] == [35, 35]
    assert alike.ready(OpKind.BACKWARD, 2) == [0.5, 1.0]


def looked_up(name: str) -> LayerProfile:
    """A layer of 100 bytes, 80 of which are 20 rows of a table; a microbatch of the profiled 2 rows touches 10 of these."""
    return replace(layer(name), gradient_rows=10, looked_up_rows=20, looked_up_bytes=80)


def test_replicas_sum_the_rows_that_an_update_touches_and_publish_all() -> None:
    profile = ModelProfile(name="m", microbatch_size=2, layers=(looked_up("a"), layer("b")))
    # Two microbatches of 4 rows are four of the profiled ones: each leaves out half of the rows.
    found = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0,), (1,)), microbatch_size=4))
    assert found.stages[0, 0].untouched_bytes == 80 / 2**4
    assert found.collective_bytes(Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))) == 95
    assert found.collective_bytes(Collective(CollectiveKind.WEIGHTS, 0, 0, 0, (0, 1))) == 100
    assert found.stages[0, 0].gradient_bytes == 100, "gradients are held whole"


def test_a_table_that_is_tied_to_a_layer_of_its_stage_is_summed_whole() -> None:
    tied = tuple(replace(one, tied="w", tied_bytes=80) for one in (looked_up("a"), layer("b")))
    profile = ModelProfile(name="m", microbatch_size=2, layers=(*tied, layer("c")))
    together = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0, 1), (2,))))
    apart = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0,), (1, 2))))
    assert [cost.stages[0, 0].untouched_bytes for cost in (together, apart)] == [0, 20]


def test_a_stage_needs_for_a_while_what_one_of_its_layers_needs_beyond_what_those_behind_it_keep() -> None:
    def working(name: str, num_bytes: int) -> LayerProfile:
        return replace(layer(name), working_bytes=num_bytes, input_grad_working_bytes=num_bytes)

    profile = ModelProfile(name="m", microbatch_size=2, layers=(working("a", 95), working("b", 50), layer("c")))
    found = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0, 1), (2,)), microbatch_size=4)).stages
    # When the first layer works, the second keeps nothing of its 40 bytes; of an input gradient, it still does.
    assert (found[0, 0].working_bytes, found[0, 0].input_grad_working_bytes) == (2 * 55, 2 * 145)
    assert (found[1, 1].working_bytes, found[1, 1].input_grad_working_bytes) == (0, 0)


def test_stages_share_what_their_layers_share_and_one_stage_holds_it_once() -> None:
    tied = [replace(layer(name), tied="w", tied_bytes=60) for name in "ad"]
    profile = ModelProfile(name="m", microbatch_size=2, layers=(tied[0], layer("b"), layer("c"), tied[1]))
    apart = plan(profile, ClusterTopology.uniform(2), ((0, 1), (2, 3)))
    assert apart.schedule.graph.ties == ((0, 1),)
    assert plan_cost(apart).tied_bytes == {0: 60}
    assert [plan_cost(apart).stages[stage, stage].parameter_bytes for stage in range(2)] == [200, 200]
    together = plan(replace(profile, layers=(*tied[::-1], layer("b"), layer("c"))), ClusterTopology.uniform(2), ((0, 1), (2, 3)))
    assert together.schedule.graph.ties == ()
    assert plan_cost(together).tied_bytes == {}
    assert [plan_cost(together).stages[stage, stage].parameter_bytes for stage in range(2)] == [140, 200]
    alike = [replace(one, tied_bytes=None, update_s=1.0, low_precision_bytes=50) for one in tied]
    whole = plan(replace(profile, layers=(*alike, layer("b"), layer("c"))), ClusterTopology.uniform(2), ((0, 1), (2, 3)))
    stage = plan_cost(whole).stages[0, 0]
    assert (stage.parameter_bytes, stage.update_s, stage.low_precision_bytes) == (100, 1.0, 50), "one weight is stepped and copied once"


def test_the_simulator_pays_for_the_sum_of_a_tie() -> None:
    def update_s(tied: str | None) -> float:
        ends = [replace(layer(name), tied=tied, tied_bytes=100 if tied else None) for name in "ac"]
        profile = ModelProfile(name="m", microbatch_size=2, layers=(ends[0], layer("b"), ends[1]))
        topology = ClusterTopology.uniform(3, bandwidth_bytes_per_s=10.0, latency_s=0.5)
        return simulate(plan(profile, topology, ((0,), (1,), (2,)))).update_s

    # Once there and back with half of it each; the others wait for the norm until then.
    assert update_s("w") - update_s(None) == pytest.approx(2 * (0.5 + 5.0))


def test_the_optimizer_takes_the_time_of_its_layers_whatever_the_microbatch() -> None:
    profile = ModelProfile(name="m", microbatch_size=2, layers=(layer("a", update_s=0.25), layer("b", update_s=0.5), layer("c")))
    found = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0, 1), (2,)), microbatch_size=4)).stages
    assert found[0, 0].update_s == 0.75
    assert found[1, 1].update_s == 0.0


def test_a_device_twice_as_fast_takes_half_the_time() -> None:
    nodes = (Node(name="n", devices=(Device("slow", "cpu"), Device("fast", "cpu", speed=2.0)), link=NodeLink(latency_s=0.0)),)
    profile = ModelProfile(name="m", microbatch_size=1, layers=(layer("a", update_s=1.0), layer("b", update_s=1.0)))
    found = plan_cost(plan(profile, ClusterTopology(name="t", nodes=nodes), ((0,), (1,)), microbatch_size=1))
    assert (found.stages[0, 0].forward_s, found.stages[1, 1].forward_s) == (1.0, 0.5)
    assert found.stages[1, 1].update_s == 0.5


def test_a_kind_of_device_has_its_own_times_where_it_was_measured() -> None:
    nodes = (Node(name="n", devices=(Device("x", "cpu"), Device("y", "gpu")), link=NodeLink(latency_s=0.0)),)
    times = tuple(LayerTimes(forward_s=0.1, backward_s=0.3, weight_grad_s=0.1) for _ in range(2))
    profile = ModelProfile(name="m", microbatch_size=1, layers=(layer("a"), layer("b", update_s=0.6)), device_kinds={"gpu": times})
    found = plan_cost(plan(profile, ClusterTopology(name="t", nodes=nodes), ((0,), (1,)), microbatch_size=1))
    assert found.stages[0, 0].backward_s == 2.0
    assert found.stages[1, 1].backward_s == 0.3
    assert found.stages[1, 1].update_s == pytest.approx(0.6 * 0.4 / 3.0), "as much less as its layer"


def test_a_split_backward_takes_what_its_parts_take_apart() -> None:
    split = replace(layer("a"), split_s=0.25)
    profile = ModelProfile(name="m", microbatch_size=1, layers=(split, replace(split, name="b"), layer("c")))
    found = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0, 1), (2,)), microbatch_size=2))
    seconds = [found.compute_s(0, (Op(kind, 0, 0),)) for kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT)]
    assert seconds == pytest.approx([8.0, 4.0 + 1.0, 4.0])


def test_a_part_of_the_time_is_that_of_any_number_of_rows() -> None:
    layers = (replace(layer("a"), fixed_share=0.5), replace(layer("b"), forward_s=3.0, fixed_share=0.25), layer("c"))
    profile = ModelProfile(name="m", microbatch_size=2, layers=layers)
    found = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0, 1), (2,)), microbatch_size=4))
    whole = found.compute_s(0, (Op(OpKind.FORWARD, 0, 0),))
    assert whole == pytest.approx(1.0 * (0.5 + 0.5 * 2) + 3.0 * (0.25 + 0.75 * 2)), "of twice as many rows"
    fixed_share = (3.0 * 0.5 + 5.0 * 0.25) / (3.0 * 1.5 + 5.0 * 1.75)
    for kind, seconds in ((OpKind.FORWARD, whole), (OpKind.BACKWARD, found.stages[0, 0].backward_s)):
        assert found.compute_s(0, (Op(kind, 0, 0),), (0.5,)) == pytest.approx(seconds * (fixed_share + (1 - fixed_share) / 2))
    assert found.compute_s(1, (Op(OpKind.FORWARD, 1, 0),), (0.5,)) == 1.0


def test_an_output_crosses_once_however_many_layers_take_it() -> None:
    edges = (NamedEdge(producer="a", consumer="b"), NamedEdge(producer="a", consumer="c", bytes=5), NamedEdge(producer="b", consumer="c"))
    profile = ModelProfile(name="m", microbatch_size=1, layers=(layer("a"), layer("b"), layer("c")), named_edges=edges)
    found = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0,), (1, 2)), microbatch_size=1))
    assert found.edge_bytes == {(0, 1): 8}


def test_outputs_of_several_layers_are_added_up_and_scaled() -> None:
    edges = (
        NamedEdge(producer="a", consumer="b", bytes=3),
        NamedEdge(producer="a", consumer="c", bytes=10),
        NamedEdge(producer="b", consumer="c", bytes=20),
    )
    profile = ModelProfile(name="m", microbatch_size=2, layers=(layer("a"), layer("b"), layer("c")), named_edges=edges)
    found = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0, 1), (2,)), microbatch_size=1))
    assert found.edge_bytes == {(0, 1): 15}


def test_devices_share_the_cores_of_their_node_only_where_there_are_too_few() -> None:
    devices = tuple(Device(f"cpu{index}", "cpu") for index in range(3))
    profile = ModelProfile(name="m", microbatch_size=1, layers=(layer("a"), layer("b"), layer("c")))
    for cores, groups in ((2, [((0, 1, 2), 2)]), (3, []), (None, [])):
        topology = ClusterTopology(name="t", nodes=(Node(name="n", devices=devices, link=NodeLink(latency_s=0.0), cores=cores),))
        shared = plan_cost(plan(profile, topology, ((0,), (1,), (2,)))).shared_compute
        assert [(group.devices, group.cores) for group in shared] == groups


def test_a_device_of_a_plan_holds_the_versions_that_its_schedule_keeps() -> None:
    profile = ModelProfile(name="m", microbatch_size=1, layers=tuple(layer(name) for name in "abcd"))
    one_version = plan(profile, ClusterTopology.uniform(4), ((0,), (1,), (2,), (3,)), microbatch_size=1)
    assert standing_bytes(plan_cost(one_version), 0) == 100 + 200
    two_versions = replace(one_version, schedule=handwritten.pipedream_2bw())
    assert standing_bytes(plan_cost(two_versions), 0) == 2 * 100 + 200


def test_of_a_weight_in_low_precision_a_version_is_the_copy_and_the_weight_is_held_once() -> None:
    # Of 100 bytes, 80 are computed with as copies of 40.
    layers = tuple(replace(layer(name), low_precision_bytes=40) for name in "abcd")
    one_version = plan(
        ModelProfile(name="m", microbatch_size=1, layers=layers), ClusterTopology.uniform(4), ((0,), (1,), (2,), (3,)), microbatch_size=1
    )
    assert standing_bytes(plan_cost(one_version), 0) == (20 + 40) + 80 + 200
    two_versions = replace(one_version, schedule=handwritten.pipedream_2bw())
    assert standing_bytes(plan_cost(two_versions), 0) == 2 * (20 + 40) + 80 + 200


def test_frozen_weights_are_held_once_and_nothing_else() -> None:
    layers = tuple(replace(layer(name), frozen_bytes=70, low_precision_bytes=10) for name in "abcd")
    profile = ModelProfile(name="m", microbatch_size=1, layers=layers)
    one_version = plan(profile, ClusterTopology.uniform(4), ((0,), (1,), (2,), (3,)), microbatch_size=1)
    stage = plan_cost(one_version).stages[0, 0]
    assert (stage.parameter_bytes, stage.trained_bytes, stage.gradient_bytes, stage.state_bytes) == (100, 30, 30, 60)
    assert standing_bytes(plan_cost(one_version), 0) == 70 + 20 + (10 + 10) + 60
    two_versions = replace(one_version, schedule=handwritten.pipedream_2bw())
    assert standing_bytes(plan_cost(two_versions), 0) - standing_bytes(plan_cost(one_version), 0) == 10 + 10
    assert plan_cost(one_version).collective_bytes(Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))) == 30


def test_state_of_the_optimizer_is_as_large_as_measured() -> None:
    layers = (replace(layer("a"), state_bytes=33), layer("b"), *(replace(layer(name), state_bytes=7) for name in "cd"))
    profile = ModelProfile(name="m", microbatch_size=1, layers=layers)
    two = plan_cost(plan(profile, ClusterTopology.uniform(2), ((0, 1), (2, 3)), microbatch_size=1))
    assert [two.stages[device, device].state_bytes for device in range(2)] == [33 + 200, 7 + 7]
    problem = Problem(profile=profile, topology=ClusterTopology.uniform(2), num_microbatches=2, microbatch_size=1)
    assert problem.standing_prefix.tolist() == [0, 233, 233 + 400, 633 + 207, 840 + 207]
    assert problem.most_state_bytes_per_parameter_byte == 3.0, "a tied weight counts once with as much as it may have"


def test_copies_that_divide_the_optimizer_hold_a_part_of_its_state_each() -> None:
    profile = ModelProfile(name="m", microbatch_size=1, layers=tuple(layer(name) for name in "abcd"))
    four = plan(profile, ClusterTopology.uniform(4), ((0,), (1,), (2,), (3,)), microbatch_size=1)
    schedule = catalogue.build("amdp", ScheduleRequest(4, 4))
    assert [standing_bytes(plan_cost(replace(four, schedule=schedule)), device) for device in range(4)] == [2 * 300] * 4
    owned = replace(four, schedule=shard_optimizer(schedule))
    assert [standing_bytes(plan_cost(owned), device) for device in range(4)] == [2 * 100 + 200] * 4


def test_replicas_of_a_worker_each_hold_the_stage() -> None:
    profile = ModelProfile(name="m", microbatch_size=1, layers=(layer("a"), layer("b")))
    one_each = plan(profile, ClusterTopology.uniform(3), ((0,), (1,)), microbatch_size=1)
    workers = ((Replica(device="device0", share=0.5), Replica(device="device1", share=0.5)), (Replica(device="device2"),))
    found = plan_cost(replace(one_each, workers=workers))
    assert sorted(found.stages) == [(0, 0), (1, 0), (2, 1)]
    assert found.devices == ("device0", "device1", "device2")


def test_all_sums_of_the_same_devices_have_the_pattern_of_the_largest_as_in_a_run() -> None:
    # Three quick wires and a bad one: few bytes are exchanged at once, many go round it.
    devices = (0, 1, 2, 3)

    def path(source: int, target: int) -> Path:
        bandwidth = 1e6 if {source, target} == {0, 1} else 1e8
        return Path(0.05, bandwidth, ((f"{source}->{target}", bandwidth),))

    stages = {(device, stage): replace(STAGE, parameter_bytes=size) for device in devices for stage, size in enumerate((10**9, 1000))}
    cost = Cost(devices=("a", "b", "c", "d"), stages=stages, edge_bytes={}, path=path)
    large, small = (Collective(CollectiveKind.GRADIENTS, stage, 0, 0, devices) for stage in (0, 1))
    assert cost.pattern(large) != cost.pattern(small)
    of_run = cost.with_patterns([small, large])
    assert of_run.pattern(small) == of_run.pattern(large) == cost.pattern(large)
