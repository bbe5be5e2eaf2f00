"""The simulator against anchors from papers, cases worked out by hand, and a longest-path rule of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Link, Node, NodeLink, Overheads, Path, SharedLink
from raypipe.artifacts.topology import Device as TopologyDevice
from raypipe.artifacts.trace import Source, SpanKind, Trace
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Await, Collective, CollectiveKind, Start
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, UpdateScope, WeightRule, dependencies, ops_of
from raypipe.schedules.lower import Compute, Placement, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import evaluation, late_updates, over_graph, shard_optimizer
from raypipe.schedules.reductions import add_reductions
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost, SharedCompute, StageCost
from raypipe.simulation.memory import standing_bytes
from raypipe.simulation.plan_cost import equal_stages, plan_cost
from raypipe.simulation.simulator import simulate, simulate_programs, time_order
from tests import strategies
from tests.schedules import handwritten


def build(name: str, devices: int, microbatches: int, **more: int | UpdateScope) -> Schedule:
    schedule = catalogue.build(name, replace(ScheduleRequest(devices, microbatches), **more))  # type: ignore[arg-type]
    validate(schedule)
    return schedule


def run(schedule: Schedule, cost: Cost) -> Trace:
    return simulate_programs(lower(schedule), cost, name=schedule.name, num_updates=schedule.num_updates)


def run_equal(
    schedule: Schedule, forward_s: float = 1.0, backward_s: float = 2.0, weight_grad_s: float = 1.0, latency_s: float = 0.0
) -> Trace:
    return run(
        schedule,
        equal_stages(schedule, forward_s=forward_s, backward_s=backward_s, weight_grad_s=weight_grad_s, latency_s=latency_s),
    )


def times(trace: Trace, kind: SpanKind = SpanKind.COMPUTE) -> dict[tuple[int, str], list[float]]:
    return {(span.device, span.name): [span.start_s, span.end_s] for span in trace.spans if span.kind is kind}


# Anchors


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_take_33_on_4_devices_with_8_microbatches(name: str) -> None:
    assert run_equal(build(name, 4, 8)).makespan_s == 33


def test_interleaved_takes_57_of_which_48_are_busy() -> None:
    trace = run_equal(build("interleaved", 4, 8, num_chunks=2))
    assert trace.makespan_s == 57
    assert trace.busy_s == (48,) * 4


@pytest.mark.parametrize(
    ("name", "times_s", "idle_s"),
    [
        ("zb-h1", (1, 1, 1), (3, 2, 1, 0)),
        ("zb-h1", (2, 2, 1), (9, 6, 3, 0)),
        ("zb-h1", (3, 4, 2), (15, 10, 5, 0)),
        ("zb-h2", (1, 1, 1), (0, 0, 0, 0)),
        ("zb-h2", (2, 2, 1), (6, 4, 2, 0)),
        ("zb-h2", (3, 4, 2), (9, 6, 3, 0)),
    ],
)
def test_the_devices_of_zero_bubble_schedules_idle_as_published(name: str, times_s: tuple[int, int, int], idle_s: tuple[int, ...]) -> None:
    forward_s, input_grad_s, weight_grad_s = times_s
    trace = run_equal(build(name, 4, 12), forward_s, input_grad_s + weight_grad_s, weight_grad_s)
    assert trace.idle_s == idle_s


@pytest.mark.parametrize(("devices", "with_equal_s", "with_double_s"), [(4, 10, 16), (8, 22, 36), (16, 46, 76)])
def test_opposite_pipelines_take_the_slots_of_chimera(devices: int, with_equal_s: int, with_double_s: int) -> None:
    schedule = handwritten.opposite_pipelines(devices)
    assert run_equal(schedule, 1, 1).makespan_s == with_equal_s
    assert run_equal(schedule, 1, 2).makespan_s == with_double_s


@pytest.mark.parametrize(("name", "small", "large"), [("1f1b", 0.2431, 0.2646), ("zb-h1", 0.1585, 0.1421), ("zb-h2", 0.1083, 0.0641)])
def test_bubbles_are_those_of_the_zero_bubble_paper(name: str, small: float, large: float) -> None:
    """Qi et al., 2024, arXiv 2401.10241, table 5 and 9: models of 1.5 and 28.3 billion parameters, times in ms."""
    for devices, microbatches, (forward, input_grad, weight_grad, latency), expected in (
        (8, 24, (18.522, 18.086, 9.337, 0.601), small),
        (32, 96, (10.419, 10.207, 7.715, 0.408), large),
    ):
        schedule = build(name, devices, microbatches, update_scope=UpdateScope.STAGE)
        trace = run_equal(schedule, forward, input_grad + weight_grad, weight_grad, latency)
        assert trace.bubble_ratio == pytest.approx(expected, abs=5.1e-5)


@pytest.mark.parametrize(("name", "slots"), [("async-1f1b", 3), ("pipedream-2bw", None)])
def test_late_updates_of_tied_stages_wait_for_neither_sum_nor_norm(name: str, slots: int | None) -> None:
    schedule = build(name, 4, 4, num_updates=8, update_scope=UpdateScope.TIED)
    schedule = over_graph(schedule, StageGraph(4, schedule.graph.edges, ((0, 3),)))
    late = late_updates(schedule, slots)
    validate(late)
    waits = [span for span in run_equal(schedule, latency_s=0.3).spans if span.kind is SpanKind.COLLECTIVE]
    assert {span.name.split(" ")[0] for span in waits} == {"tied", "tied_norm"}
    trace = run_equal(late, latency_s=0.3)
    behind_the_window = max(span.end_s for span in trace.spans if span.name.startswith("3B"))
    assert not [span for span in trace.spans if span.kind is SpanKind.COLLECTIVE and span.end_s <= behind_the_window]
    assert trace.steady_update_s < run_equal(schedule, latency_s=0.3).steady_update_s


def test_sums_of_late_updates_are_due_by_the_first_forward_that_reads_their_version() -> None:
    programs = lower(late_updates(build("pipedream-2bw", 2, 4, num_updates=6)), Placement.even(2, 2))
    order = CompiledOrder(programs)
    for (program, number), position in order.deadlines.items():
        update, stage = order.collectives[number].update, order.collectives[number].stage
        behind = [item for item in programs[program].items[position:] if isinstance(item, Compute)]
        assert behind[0].ops == (Op(OpKind.UPDATE, stage, update),)
        if update < 4:  # of the last two, no forward of the window reads the version
            assert (behind[1].ops, behind[1].versions) == ((Op(OpKind.FORWARD, stage, 4 * (update + 2)),), (update + 1,))


def test_zb_h2_is_free_of_bubbles_only_where_updates_wait_for_their_own_stage() -> None:
    one_update_s = run_equal(build("zb-h2", 4, 12)).makespan_s
    of_stage = run_equal(build("zb-h2", 4, 12, num_updates=6, update_scope=UpdateScope.STAGE))
    of_all = run_equal(build("zb-h2", 4, 12, num_updates=6, update_scope=UpdateScope.GLOBAL))
    assert of_stage.steady_update_s == 12 * 3
    assert of_all.steady_update_s == one_update_s == 12 * 3 + 3


def test_asynchronous_1f1b_pays_for_a_global_norm() -> None:
    for scope, update_s in ((UpdateScope.STAGE, 24), (UpdateScope.GLOBAL, 38)):
        schedule = handwritten.without_flush(8, 8, 9, weight_rule=WeightRule.LIVE, update_scope=scope)
        assert run_equal(schedule).steady_update_s == update_s


# Against the rule of dependencies


def earliest_end_s(schedule: Schedule, cost: Cost, latency_s: float) -> float:
    """The longest path through program order and dependencies.

    Those between workers take the latency, and those on the sum of copies twice that: each share goes to the owner of its slice, and the
    total to all. With links without limits that is quicker than a ring of any number of copies.
    """
    schedule = add_reductions(schedule)
    joined = before_joined_sums(schedule)
    ends: dict[Op, float] = {}
    heads = [0] * schedule.num_workers
    free_s = [0.0] * schedule.num_workers
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(schedule.programs):
            while heads[worker] < len(program):
                ops = ops_of(program[heads[worker]])
                needed = {other for op in ops for other in (*dependencies(schedule, op), *joined.get(op, ()))} - set(ops)
                if not needed <= ends.keys():
                    break
                hops = {
                    other: 2 * (len(schedule.replicas[other.stage]) > 1)
                    if other.kind is OpKind.REDUCE
                    else int(schedule.worker(other) != worker)
                    for other in needed
                }
                start_s = max((ends[other] + hops[other] * latency_s for other in needed), default=0.0)
                shares = tuple(1 / len(schedule.find(op._replace(part=0))) for op in ops)
                free_s[worker] = max(start_s, free_s[worker]) + cost.compute_s(worker, ops, shares)
                ends |= dict.fromkeys(ops, free_s[worker])
                heads[worker] += 1
                moved = True
    assert heads == [len(program) for program in schedule.programs]
    return max(ends.values())


def before_joined_sums(schedule: Schedule) -> dict[Op, set[Op]]:
    """What each update waits for besides: norms and sums of ties start behind what their members have computed by then."""
    programs = lower(schedule)
    joined = {CollectiveKind.TIED, CollectiveKind.NORM, CollectiveKind.TIED_NORM}
    before: dict[Collective, set[Op]] = {}
    for program in programs:
        last: tuple[Op, ...] = ()
        for item in program.items:
            if isinstance(item, Compute):
                last = item.ops
            elif isinstance(item, Start) and item.collective.kind in joined:
                before.setdefault(item.collective, set()).update(last)
    found: dict[Op, set[Op]] = {}
    for program in programs:
        needed: set[Op] = set()
        for item in program.items:
            if isinstance(item, Await):
                needed |= before.get(item.collective, set())
            elif isinstance(item, Compute):
                found |= dict.fromkeys(item.ops, needed)
                needed = set()
    return found


@st.composite
def costs(draw: st.DrawFn, schedule: Schedule, *, latency_s: float = 0.0) -> Cost:
    """Whole seconds for each stage, which add up exactly; the same on all devices."""
    seconds = st.integers(0, 6)

    def stage() -> StageCost:
        backward_s = draw(seconds)
        return StageCost(draw(seconds), backward_s, draw(st.integers(0, backward_s)), draw(seconds), saved_bytes=5, parameter_bytes=3)

    stages = [stage() for _ in range(schedule.num_stages)]
    return replace(
        equal_stages(schedule, latency_s=latency_s),
        stages={(holder.worker, holder.stage): stages[holder.stage] for holder in schedule.first_pipeline},
    )


@given(st.data())
def test_without_latency_the_makespan_is_the_longest_path(data: st.DataObject) -> None:
    schedule = data.draw(strategies.schedules())
    cost = data.draw(costs(schedule))
    assert run(schedule, cost).makespan_s == earliest_end_s(schedule, cost, 0.0)


@given(st.data(), st.integers(0, 5))
def test_with_latency_the_makespan_is_the_longest_path_of_updates_by_stage(data: st.DataObject, latency_s: int) -> None:
    schedule = replace(data.draw(strategies.family_schedules()), update_scope=UpdateScope.STAGE)
    cost = data.draw(costs(schedule, latency_s=latency_s))
    assert run(schedule, cost).makespan_s == earliest_end_s(schedule, cost, latency_s)


@given(st.data(), st.integers(0, 5))
def test_the_makespan_is_no_less_than_the_busiest_device_and_no_more_than_all_in_turn(data: st.DataObject, latency_s: int) -> None:
    schedule = data.draw(strategies.schedules())
    trace = run(schedule, data.draw(costs(schedule, latency_s=latency_s)))
    assert trace.makespan_s >= max(trace.busy_s)
    waits = sum(span.end_s - span.start_s for span in trace.spans if span.kind is not SpanKind.COMPUTE)
    assert trace.makespan_s <= sum(trace.busy_s) + waits


@given(st.data(), st.integers(0, 5), st.integers(0, 5))
def test_longer_ops_and_latencies_never_shorten_the_makespan(data: st.DataObject, latency_s: int, more_latency_s: int) -> None:
    schedule = data.draw(strategies.schedules())
    shorter = data.draw(costs(schedule, latency_s=latency_s))
    more = data.draw(costs(schedule))
    stages = {
        at: StageCost(
            cost.forward_s + more.stages[at].forward_s,
            # The input gradient and the weight gradient each grow.
            cost.backward_s + more.stages[at].backward_s,
            cost.weight_grad_s + more.stages[at].weight_grad_s,
            cost.update_s + more.stages[at].update_s,
        )
        for at, cost in shorter.stages.items()
    }
    longer = replace(equal_stages(schedule, latency_s=latency_s + more_latency_s), stages=stages)
    without_bytes = replace(shorter, stages={at: replace(cost, parameter_bytes=0) for at, cost in shorter.stages.items()})
    assert run(schedule, longer).makespan_s >= run(schedule, without_bytes).makespan_s


@given(st.data())
def test_every_op_of_the_schedule_runs_once_on_its_worker_in_order(data: st.DataObject) -> None:
    schedule = data.draw(strategies.schedules())
    trace = run(schedule, data.draw(costs(schedule, latency_s=1.0)))
    for worker, program in enumerate(schedule.programs):
        ran = [span.name for span in trace.by_device[worker] if span.kind is SpanKind.COMPUTE and span.end_s > span.start_s]
        computed = [str(slot) for slot in program if not any(op.kind is OpKind.REDUCE for op in ops_of(slot))]
        assert [name for name in computed if name in set(ran)] == ran
    names = [span.name for span in trace.spans if span.kind is SpanKind.COMPUTE]
    slots = [slot for program in schedule.programs for slot in program]
    assert sorted(names) == sorted(str(slot) for slot in slots if not any(op.kind is OpKind.REDUCE for op in ops_of(slot)))


@given(st.data())
def test_the_spans_of_a_device_never_overlap(data: st.DataObject) -> None:
    schedule = data.draw(strategies.schedules())
    trace = run(schedule, data.draw(costs(schedule, latency_s=2.0)))
    for row in trace.by_device:
        for before, after in itertools.pairwise(row):
            assert before.end_s <= after.start_s


# Links, by hand


def forwards(num_stages: int, num_microbatches: int) -> Schedule:
    return evaluation(build("gpipe", num_stages, 1), num_microbatches=num_microbatches)


def linked(schedule: Schedule, path: Callable[[int, int], Path], *, output_bytes: int = 10, forward_s: float = 1.0) -> Trace:
    cost = replace(
        equal_stages(schedule, forward_s=forward_s, backward_s=1.0),
        edge_bytes=dict.fromkeys(schedule.graph.edges, output_bytes),
        path=path,
    )
    return run(schedule, cost)


def by_name(topology: ClusterTopology) -> Callable[[int, int], Path]:
    names = [device.name for device in topology.devices]
    return lambda source, target: topology.path(names[source], names[target])


def test_a_message_occupies_its_link_for_its_bytes_and_arrives_a_latency_later() -> None:
    topology = ClusterTopology.uniform(2, latency_s=0.5, bandwidth_bytes_per_s=5.0)
    schedule = build("gpipe", 2, 2, update_scope=UpdateScope.STAGE)
    trace = linked(schedule, by_name(topology))
    computed, moved = times(trace), times(trace, SpanKind.TRANSFER)
    # Activations leave at 1 and 2, each takes the wire for 2 s: the second waits for the first until 3.
    assert moved[1, "activation 0->1 of microbatch 0"] == [1, 3.5]
    assert moved[1, "activation 0->1 of microbatch 1"] == [3, 5.5]
    assert computed[1, "1F0"] == [3.5, 4.5]
    assert computed[1, "1F1"] == [5.5, 6.5]
    # Gradients leave at 7.5 and 8.5.
    assert moved[0, "gradient 1->0 of microbatch 0"] == [7.5, 10]
    assert moved[0, "gradient 1->0 of microbatch 1"] == [9.5, 12]
    assert computed[0, "0B1"] == [12, 13]
    assert trace.makespan_s == 13
    assert {span.bytes for span in trace.spans if span.kind is SpanKind.TRANSFER} == {10}


def test_a_device_computes_while_its_messages_are_under_way() -> None:
    topology = ClusterTopology.uniform(2, bandwidth_bytes_per_s=1.0)
    trace = linked(forwards(2, 3), by_name(topology))
    assert [times(trace)[0, f"0F{index}"] for index in range(3)] == [[0, 1], [1, 2], [2, 3]]
    assert [times(trace)[1, f"1F{index}"] for index in range(3)] == [[11, 12], [21, 22], [31, 32]]


def test_opposite_directions_of_a_link_do_not_hinder_each_other() -> None:
    """Two pipelines in opposite directions: each direction carries one message, and both arrive as if alone; over one hub they share it."""
    schedule = evaluation(handwritten.opposite_pipelines(2), num_microbatches=1)
    both = replace(
        schedule,
        pipelines=((0, 1), (1, 0)),
        programs=((Op(OpKind.FORWARD, 0, 0), Op(OpKind.FORWARD, 1, 1, 1)), (Op(OpKind.FORWARD, 0, 1, 1), Op(OpKind.FORWARD, 1, 0))),
        num_microbatches=2,
    )
    validate(both)
    nodes = tuple(Node(name=f"node{index}", devices=(TopologyDevice(f"device{index}", "cpu"),)) for index in range(2))
    duplex = ClusterTopology(
        name="duplex", nodes=nodes, links=(Link(source="node0", target="node1", bandwidth_bytes_per_s=5.0, latency_s=0.0),)
    )
    computed = times(linked(both, by_name(duplex)))
    assert computed[1, "1F0"] == computed[0, "1F1@1"] == [3, 4]
    shared = SharedLink(name="hub", bandwidth_bytes_per_s=5.0, members=(("node0", "node1"), ("node1", "node0")))
    computed = times(linked(both, by_name(replace(duplex, shared_links=(shared,)))))
    assert computed[1, "1F0"] == computed[0, "1F1@1"] == [5, 6]


def three_nodes(*shared: SharedLink, bandwidth_bytes_per_s: float | None = None) -> ClusterTopology:
    nodes = tuple(Node(name=f"node{index}", devices=(TopologyDevice(f"device{index}", "cpu"),)) for index in range(3))
    link = NodeLink(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=0.0)
    return ClusterTopology(name="three", nodes=nodes, shared_links=shared, default_link=link)


def test_messages_of_one_device_take_turns_and_those_of_several_share_a_bottleneck() -> None:
    uplink = SharedLink(name="uplink", bandwidth_bytes_per_s=5.0, members=(("node0", "node1"), ("node1", "node2")))
    computed = times(linked(forwards(3, 2), by_name(three_nodes(uplink))))
    # Messages take 2 s alone. The second one of device 0 leaves at 3; from 4 to 6 it shares the uplink with the first one of device 1.
    assert computed[1, "1F0"] == [3, 4]
    assert computed[1, "1F1"] == [6, 7]
    assert computed[2, "2F0"] == [7, 8]
    assert computed[2, "2F1"] == [9, 10]
    apart = times(linked(forwards(3, 2), by_name(three_nodes(bandwidth_bytes_per_s=5.0))))
    assert apart[2, "2F0"] == [6, 7]
    assert apart[2, "2F1"] == [8, 9]


def test_a_message_that_waits_for_its_senders_port_keeps_no_receiver_waiting() -> None:
    """Device 0 sends to 1 twice and then to 2; what 3 sends to 2 meanwhile has the port of 2 until device 0 comes to it."""
    ports = [
        SharedLink(name=f"{way}{node}", bandwidth_bytes_per_s=5.0, members=members)
        for way, node, members in (
            ("out", 0, (("node0", "node1"), ("node0", "node2"))),
            ("in", 2, (("node0", "node2"), ("node3", "node2"))),
        )
    ]
    nodes = tuple(Node(name=f"node{index}", devices=(TopologyDevice(f"device{index}", "cpu"),)) for index in range(4))
    topology = ClusterTopology(name="ports", nodes=nodes, shared_links=tuple(ports), default_link=NodeLink(latency_s=0.0))
    schedule = evaluation(handwritten.opposite_pipelines(2), num_microbatches=1)
    pipelines = ((0, 1), (0, 1), (0, 2), (3, 3), (3, 2))
    first, second = ([Op(OpKind.FORWARD, stage, pipeline, pipeline) for pipeline in range(5)] for stage in range(2))
    programs = (tuple(first[:3]), tuple(second[:2]), (second[4], second[2]), (first[3], second[3], first[4]))
    waiting = replace(schedule, pipelines=pipelines, programs=programs, num_microbatches=5)
    validate(waiting)
    computed = times(linked(waiting, by_name(topology)))
    assert computed[1, "1F1@1"] == [5, 6]
    assert computed[2, "1F4@4"] == [5, 6]
    assert computed[2, "1F2@2"] == [7, 8]


def test_a_message_to_a_slow_node_leaves_the_port_to_others() -> None:
    """Device 0 sends to 1, which takes 1 byte a second, and then to 2, which takes 5 as the port of 0 does."""
    ports = [
        SharedLink(name=name, bandwidth_bytes_per_s=rate, members=members)
        for name, rate, members in (
            ("out", 5.0, (("node0", "node1"), ("node0", "node2"))),
            ("slow", 1.0, (("node0", "node1"),)),
        )
    ]
    nodes = tuple(Node(name=f"node{index}", devices=(TopologyDevice(f"device{index}", "cpu"),)) for index in range(3))
    topology = ClusterTopology(name="ports", nodes=nodes, shared_links=tuple(ports), default_link=NodeLink(latency_s=0.0))
    schedule = evaluation(handwritten.opposite_pipelines(2), num_microbatches=1)
    first, second = ([Op(OpKind.FORWARD, stage, pipeline, pipeline) for pipeline in range(2)] for stage in range(2))
    programs = (tuple(first), (second[0],), (second[1],))
    sent = replace(schedule, pipelines=((0, 1), (0, 2)), programs=programs, num_microbatches=2)
    validate(sent)
    computed = times(linked(sent, by_name(topology)))
    assert computed[1, "1F0"] == [11, 12], "10 bytes at 1 a second"
    # At 4 bytes a second beside those; in turn, it would begin at 13.
    assert computed[2, "1F1@1"] == pytest.approx([4.5, 5.5])


def test_two_devices_of_a_node_share_the_wire_to_another_node() -> None:
    """Replicas split the rows: both halves pass the wire together."""
    nodes = (
        Node(name="a", devices=(TopologyDevice("a0", "cpu"), TopologyDevice("a1", "cpu")), link=NodeLink(latency_s=0.0)),
        Node(name="b", devices=(TopologyDevice("b0", "cpu"),)),
    )
    topology = ClusterTopology(name="two", nodes=nodes, links=(Link(source="a", target="b", bandwidth_bytes_per_s=5.0, latency_s=0.0),))
    schedule = forwards(2, 1)
    programs = lower(schedule, Placement((((0, 0.5), (1, 0.5)), ((2, 1.0),))))
    cost = Cost(
        devices=("a0", "a1", "b0"),
        stages={(0, 0): StageCost(1, 1, 1), (1, 0): StageCost(1, 1, 1), (2, 1): StageCost(1, 1, 1)},
        edge_bytes={(0, 1): 10},
        path=by_name(topology),
    )
    trace = simulate_programs(programs, cost, name="split")
    assert times(trace)[0, "0F0"] == times(trace)[1, "0F0"] == [0, 0.5]
    # Each half is 5 bytes: alone it would take 1 s.
    assert [(span.start_s, span.end_s) for span in trace.spans if span.kind is SpanKind.TRANSFER] == [(0.5, 2.5), (0.5, 2.5)]
    assert times(trace)[2, "1F0"] == [2.5, 3.5]


# Cores, by hand


def on_cores(schedule: Schedule, forward_s: Sequence[float], shared: SharedCompute) -> Trace:
    cost = equal_stages(schedule)
    stages = {(stage, stage): StageCost(seconds, 1, 1) for stage, seconds in enumerate(forward_s)}
    return run(schedule, replace(cost, stages=stages, shared_compute=(shared,)))


def test_two_devices_that_compute_at_once_on_one_core_take_twice_as_long() -> None:
    computed = times(on_cores(forwards(2, 2), (1, 1), SharedCompute((0, 1), 1)))
    assert computed == {(0, "0F0"): [0, 1], (0, "0F1"): [1, 3], (1, "1F0"): [1, 3], (1, "1F1"): [3, 4]}


def test_a_device_gets_the_core_back_when_the_other_is_done() -> None:
    computed = times(on_cores(forwards(2, 2), (1, 2), SharedCompute((0, 1), 1)))
    # From 1 to 3 both run at half speed; 1F0 has one of its two seconds left and runs alone until 4.
    assert computed == {(0, "0F0"): [0, 1], (0, "0F1"): [1, 3], (1, "1F0"): [1, 4], (1, "1F1"): [4, 6]}


def test_three_devices_on_two_cores_run_at_two_thirds_of_their_speed() -> None:
    computed = times(on_cores(forwards(3, 3), (2, 2, 2), SharedCompute((0, 1, 2), 2)))
    # 0F2, 1F1 and 2F0 start together at 4 and take 3 s each.
    for at in ((0, "0F2"), (1, "1F1"), (2, "2F0")):
        assert computed[at] == pytest.approx([4, 7])


def test_devices_with_a_core_each_do_not_hinder_each_other() -> None:
    shared = on_cores(forwards(3, 4), (1, 2, 3), SharedCompute((0, 1, 2), 3))
    alone = on_cores(forwards(3, 4), (1, 2, 3), SharedCompute((), 1))
    assert times(shared) == times(alone)


@given(st.data(), st.integers(1, 4))
def test_sharing_cores_neither_loses_nor_makes_work(data: st.DataObject, cores: int) -> None:
    schedule = data.draw(strategies.family_schedules())
    cost = data.draw(costs(schedule))
    devices = tuple(range(schedule.num_workers))
    trace = run(schedule, replace(cost, shared_compute=(SharedCompute(devices, cores),)))
    alone = run(schedule, cost)
    assert trace.makespan_s >= alone.makespan_s - 1e-9
    assert trace.makespan_s >= sum(alone.busy_s) / cores - 1e-9
    assert trace.makespan_s <= alone.makespan_s * max(1, schedule.num_workers / cores) + 1e-9


# Memory


@given(st.data())
def test_memory_starts_from_and_returns_to_what_is_always_held(data: st.DataObject) -> None:
    schedule = data.draw(strategies.schedules())
    cost = equal_stages(schedule)
    stage = StageCost(1, 2, 1, saved_bytes=7, weight_grad_saved_bytes=3, parameter_bytes=100, state_bytes=20)
    cost = replace(cost, stages=dict.fromkeys(cost.stages, stage))
    trace = run(schedule, cost)
    for device, steps in enumerate(trace.memory):
        standing = standing_bytes(cost, device)
        assert steps[0] == (0.0, standing)
        assert steps[-1][1] == standing
        assert min(held for _, held in steps) == standing
        assert [at for at, _ in steps] == sorted(at for at, _ in steps)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_peak_memory_is_that_of_the_activations_in_flight(name: str) -> None:
    schedule = build(name, 4, 8)
    cost = equal_stages(schedule)
    stage = StageCost(1, 2, 1, saved_bytes=7, parameter_bytes=100, state_bytes=20)
    trace = run(schedule, replace(cost, stages=dict.fromkeys(cost.stages, stage)))
    assert trace.peak_memory_bytes == tuple(120 + 7 * held for held in metrics(schedule).peak_in_flight)


def test_a_split_backward_keeps_what_its_weight_gradient_needs() -> None:
    """Device 0 of ZB-H1 holds D whole activations at most, device D - 1 one and what D - 1 weight gradients wait for."""
    schedule = build("zb-h1", 4, 8)
    cost = equal_stages(schedule)
    stage = StageCost(1, 2, 1, saved_bytes=10, weight_grad_saved_bytes=4)
    trace = run(schedule, replace(cost, stages=dict.fromkeys(cost.stages, stage)))
    assert trace.peak_memory_bytes == (40, 34, 28, 22)


def test_gradients_are_held_from_the_first_backward_of_an_update_to_its_end() -> None:
    schedule = catalogue.build("gpipe", ScheduleRequest(2, 3, num_updates=2))
    cost = equal_stages(schedule)
    stage = StageCost(1, 2, 1, saved_bytes=10, parameter_bytes=100, state_bytes=200, gradient_bytes=25)
    trace = run(schedule, replace(cost, stages=dict.fromkeys(cost.stages, stage)))
    held = [num_bytes - 300 for _, num_bytes in trace.memory[0]]
    # Three forwards, then backwards, the first of which makes the gradients; the update lets go of them.
    assert held == [0, *[10, 20, 30, 45, 35, 25, 0] * 2]


def test_while_an_op_runs_it_needs_more_than_it_keeps() -> None:
    schedule = build("gpipe", 1, 2)
    stage = StageCost(1, 2, 1, saved_bytes=10, working_bytes=7)
    trace = run(schedule, replace(equal_stages(schedule), stages={(0, 0): stage}))
    assert trace.memory[0] == ((0, 0), (0, 17), (1, 10), (1, 27), (2, 20), (2, 27), (4, 10), (4, 17), (6, 0))


def test_a_sum_of_gradients_is_put_together_beside_them() -> None:
    schedule = handwritten.opposite_pipelines(2)
    cost = equal_stages(schedule)
    stages = dict.fromkeys(cost.stages, StageCost(1, 2, 1, gradient_bytes=25))
    trace = run(schedule, replace(cost, stages=stages))
    # The gradients of both stages, and for a moment one vector more.
    assert trace.peak_memory_bytes == (75, 75)


def test_published_weights_travel_in_a_vector_of_their_own() -> None:
    schedule = shard_optimizer(catalogue.build("amdp", ScheduleRequest(4, 4)))
    cost = equal_stages(schedule)
    stages = dict.fromkeys(cost.stages, StageCost(1, 2, 1, parameter_bytes=100, gradient_bytes=1))
    trace = run(schedule, replace(cost, stages=stages))
    for device, steps in enumerate(trace.memory):
        assert steps[-1][1] == standing_bytes(cost, device) + 200
        assert max(held for _, held in steps) >= 300


def test_memory_can_be_left_out() -> None:
    schedule = build("1f1b", 2, 2)
    trace = simulate_programs(lower(schedule), equal_stages(schedule), name="bare", with_memory=False)
    assert trace.memory == ()
    assert trace.peak_memory_bytes == ()


# Collectives and plans


def test_replicas_wait_for_the_ring_that_sums_their_gradients() -> None:
    schedule = replace(handwritten.opposite_pipelines(2), update_scope=UpdateScope.STAGE)
    cost = equal_stages(schedule)
    path = Path(latency_s=0.25, bandwidth_bytes_per_s=2.0)
    stages = dict.fromkeys(cost.stages, StageCost(1, 1, 1, parameter_bytes=12))
    trace = run(schedule, replace(cost, stages=stages, path=lambda source, target: Path() if source == target else path))
    # Two members: 2 steps of 6 bytes at 2 bytes a second, each with a latency.
    ring_s = 2 * (0.25 + 3)
    ends = {span.name: span.end_s for span in trace.spans if span.kind is SpanKind.COMPUTE}
    last_gradient_s = max(ends["0B0"], ends["0B1@1"])
    assert max(ends["0U0"], ends["0U0@1"]) == last_gradient_s + ring_s


def test_a_global_update_waits_a_latency_for_the_norm() -> None:
    schedule = build("gpipe", 2, 1)
    trace = run_equal(schedule, 1, 1, 0.5, latency_s=0.25)
    # 0F0 to 1, 1F0 from 1.25 to 2.25, 1B0 to 3.25, 0B0 from 3.5 to 4.5.
    assert trace.update_ends_s == (4.75,)
    waits = [span for span in trace.spans if span.kind is SpanKind.COLLECTIVE]
    assert [(span.device, span.start_s, span.end_s) for span in sorted(waits)] == [(0, 4.5, 4.75), (1, 3.25, 4.75)]


def test_a_plan_is_simulated_with_its_own_costs() -> None:
    profile = ModelProfile.uniform(4, forward_s=1.0, backward_s=2.0, output_bytes=10)
    topology = ClusterTopology.uniform(2, latency_s=0.0)
    plan = make_plan(
        name="small",
        planner="equal",
        cut=Cut.equal(4, 2, tuple((edge.producer, edge.consumer) for edge in profile.edges())),
        schedule=build("1f1b", 2, 4, num_updates=2),
        profile=profile,
        topology=topology,
        devices=("device0", "device1"),
        microbatch_size=1,
    )
    trace = simulate(plan)
    assert trace.source is Source.SIMULATED
    assert trace.devices == ("device0", "device1")
    assert trace.num_updates == 2
    # (M + D - 1)(F + B) with two layers a stage.
    assert trace.update_s == (4 + 1) * (2 + 4)
    assert trace == simulate_programs(lower(plan.schedule, plan.placement), plan_cost(plan), name="small", num_updates=2)


# Divided microbatches


def test_halves_take_half_the_time_each_and_carry_half_the_bytes() -> None:
    whole = build("1f1b", 3, 6)
    divided = handwritten.halved(whole)
    validate(divided)
    costs = [
        replace(equal_stages(schedule), edge_bytes={(0, 1): 100, (1, 2): 60}, path=lambda _a, _b: Path(0.25))
        for schedule in (whole, divided)
    ]
    traces = [run(schedule, cost) for schedule, cost in zip((whole, divided), costs, strict=True)]
    assert [trace.busy_s for trace in traces] == [(18,) * 3] * 2
    carried = [[span.bytes for span in trace.spans if span.kind is SpanKind.TRANSFER] for trace in traces]
    assert sum(carried[0]) == sum(carried[1]) == 2 * 6 * 160
    assert set(carried[1]) == {50, 30}
    # The first half of a backward leaves sooner than the whole.
    assert traces[1].makespan_s < traces[0].makespan_s


@given(st.integers(1, 4), st.integers(1, 6))
def test_one_order_is_timed_with_one_cost_after_the_other(num_devices: int, num_microbatches: int) -> None:
    schedule = build("zb-h1", num_devices, num_microbatches, num_updates=2)
    programs = lower(schedule)
    order = CompiledOrder(programs)
    for factor in (1.0, 2.0, 0.5):
        cost = equal_stages(schedule, forward_s=factor, backward_s=2.5 * factor, weight_grad_s=factor, latency_s=0.25 * factor)
        timing, trace = time_order(order, cost), simulate_programs(programs, cost, name="", num_updates=2)
        assert timing.makespan_s == trace.makespan_s
        assert timing.update_ends_s == trace.update_ends_s
        assert timing.busy_s == trace.busy_s
        assert timing.peak_memory_bytes == trace.peak_memory_bytes


def test_devices_pay_for_each_op_and_message() -> None:
    schedule = build("gpipe", 2, 2)
    overheads = Overheads(forward_s=0.125, backward_s=0.25, send_s=0.25, send_s_per_byte=0.0625, recv_s=0.5, recv_s_per_byte=0.125)
    computed = times(run(schedule, replace(equal_stages(schedule), edge_bytes={(0, 1): 4}, overheads=overheads)))
    # Device 1 takes the first message when it comes and the second, which was there, behind its first F.
    assert computed[0, "0F0"] == [0, 1.125]
    assert computed[0, "0F1"] == [1.625, 2.75]
    assert computed[1, "1F0"] == [2.125, 3.25]
    assert computed[1, "1F1"] == [4.25, 5.375]
    assert computed[1, "1B0"][1] - computed[1, "1B0"][0] == 2.25


# Transfers that block


def test_transfers_that_block_take_time_of_both_ends() -> None:
    # The last device takes in an activation, computes F and B, and sends the gradient: 0.5 + 3 + 0.5 a microbatch, but the first
    # activation arrives while it waits, at 1.5. Its last gradient is followed by the last backward of the first device, and the norm.
    schedule = build("1f1b", 2, 4)
    cost = replace(equal_stages(schedule, latency_s=0.5), transfers_block=True)
    assert run(schedule, cost).makespan_s == pytest.approx(1.5 + 3 + 3 * 4 + 0.5 + 2 + 0.5)


@given(st.integers(1, 6), st.integers(1, 8), st.floats(0.0, 2.0))
def test_transfers_that_block_are_never_quicker(devices: int, microbatches: int, transfer_s: float) -> None:
    schedule = build("1f1b", devices, microbatches)
    order, cost = CompiledOrder(lower(schedule)), equal_stages(schedule, latency_s=transfer_s)
    free, blocked = (time_order(order, replace(cost, transfers_block=block)) for block in (False, True))
    assert blocked.makespan_s >= free.makespan_s - 1e-9
    if not transfer_s:
        assert blocked.ends == free.ends


@pytest.mark.parametrize("name", ["zb-h1", "interleaved", "chimera", "dualpipe"])
def test_transfers_that_block_deadlock_in_no_order(name: str) -> None:
    schedule = build(name, 4, 8)
    order, cost = CompiledOrder(lower(schedule)), equal_stages(schedule, latency_s=0.3)
    assert time_order(order, replace(cost, transfers_block=True)).makespan_s > time_order(order, cost).makespan_s
