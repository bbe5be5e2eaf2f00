"""Flows on shared links against cases worked out by hand, and against the definition of max-min fairness."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, Path
from raypipe.artifacts.trace import Dimension, SpanKind, Trace, dimension
from raypipe.communication.policy import HOLD_S, Communication, Traffic
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.schedules.builders import synchronous_pipelines
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, OpKind, UpdateScope
from raypipe.schedules.lower import Placement, lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.cost import Cost, StageCost
from raypipe.simulation.flows import Network
from raypipe.simulation.simulator import simulate_programs

LINK = 1e6  # bytes per second
FAIR = Communication(scheduled=False)


@dataclass
class Clock:
    """Runs a network: submits flows at their times and fires what it pushes."""

    communication: Communication
    heap: list[tuple[float, int, int, int]] = field(default_factory=list)
    num_pushed: int = 0
    ends: dict[str, float] = field(default_factory=dict)
    begins: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.network = Network(self.communication, self.push)

    def push(self, time_s: float, number: int, epoch: int) -> None:
        self.num_pushed += 1
        heapq.heappush(self.heap, (time_s, self.num_pushed, number, epoch))

    def until(self, time_s: float) -> None:
        while self.heap and self.heap[0][0] <= time_s:
            at_s, _, number, epoch = heapq.heappop(self.heap)
            self.network.fire(number, epoch, at_s)

    def submit(
        self,
        name: str,
        num_bytes: float,
        now_s: float = 0.0,
        *,
        links: Sequence[str] = ("link",),
        path: Path | None = None,
        way: object = 0,
        traffic: Traffic = Traffic.SUM,
        deadline: int = 0,
        entrance: object = None,
        due: int = 0,
        holding: Sequence[str] | None = None,
    ) -> None:
        self.until(now_s)

        def end(begun_s: float, end_s: float) -> None:
            self.begins[name], self.ends[name] = begun_s, end_s

        path = path or Path(0.0, LINK, tuple((link, LINK) for link in links))
        self.network.submit(
            way,
            path,
            num_bytes,
            now_s,
            traffic=traffic,
            deadline=deadline,
            on_end=end,
            entrance=entrance,
            due=due,
            holding=holding,
        )


def test_a_flow_alone_takes_the_whole_link() -> None:
    clock = Clock(FAIR)
    clock.submit("one", 2e6)
    clock.until(10.0)
    assert clock.ends == {"one": 2.0}


def test_flows_on_one_link_share_it() -> None:
    clock = Clock(FAIR)
    clock.submit("long", 2e6)
    clock.submit("short", 0.5e6, 1.0)
    clock.until(10.0)
    assert clock.ends == pytest.approx({"short": 2.0, "long": 2.5})


def test_a_flow_that_another_link_holds_up_leaves_the_rest_to_the_others() -> None:
    # Bertsekas and Gallager: two share the first link, two the second; the one on both gets half of each.
    clock = Clock(FAIR)
    clock.submit("both", 1e6, links=("first", "second"))
    clock.submit("first", 1e6, links=("first",))
    clock.submit("second a", 1e6, links=("second",))
    clock.submit("second b", 1e6, links=("second",))
    clock.until(10.0)
    # A third of the second link each; the first flow has two thirds of the first link.
    assert clock.ends["first"] == pytest.approx(1.5)
    assert clock.ends["second a"] == clock.ends["second b"] == pytest.approx(3.0)
    assert clock.ends["both"] == pytest.approx(3.0)


def test_a_message_interrupts_a_sum_at_the_end_of_a_chunk() -> None:
    clock = Clock(Communication(chunk_s=0.25))
    clock.submit("sum", 2e6)
    clock.submit("message", 1e6, 0.6, traffic=Traffic.MESSAGE)
    clock.until(10.0)
    assert clock.begins["message"] == pytest.approx(0.75)
    assert clock.ends == pytest.approx({"message": 1.75, "sum": 3.0})


def test_a_message_to_another_peer_interrupts_a_sum_in_the_middle_of_a_chunk() -> None:
    clock = Clock(Communication(chunk_s=0.25))
    clock.submit("sum", 2e6, links=("port", "one"))
    clock.submit("message", 1e6, 0.6, links=("port", "other"), traffic=Traffic.MESSAGE)
    clock.until(10.0)
    assert clock.begins["message"] == pytest.approx(0.6 + HOLD_S)
    assert clock.ends == pytest.approx({"message": 1.6 + HOLD_S, "sum": 3.0})


def test_a_sum_that_is_due_earlier_goes_first() -> None:
    clock = Clock(Communication(chunk_s=0.5))
    clock.submit("late", 2e6, deadline=9)
    clock.submit("early", 1e6, 0.1, deadline=3)
    clock.until(10.0)
    assert clock.ends == pytest.approx({"early": 1.5, "late": 3.0})


def test_a_message_is_not_interrupted() -> None:
    clock = Clock(Communication(chunk_s=0.5))
    clock.submit("first", 2e6, traffic=Traffic.MESSAGE)
    clock.submit("second", 1e6, 0.1, traffic=Traffic.MESSAGE)
    clock.until(10.0)
    assert clock.ends == pytest.approx({"first": 2.0, "second": 3.0})


def test_ways_do_not_wait_for_each_other() -> None:
    clock = Clock(Communication())
    clock.submit("one", 1e6, way="a", links=("x",))
    clock.submit("other", 1e6, way="b", links=("y",))
    clock.until(10.0)
    assert clock.ends == {"one": 1.0, "other": 1.0}


def test_a_sum_leaves_a_link_that_a_message_of_another_device_passes() -> None:
    clock = Clock(Communication())
    clock.submit("sum", 1e6, links=("one", "port"), way=0)
    clock.submit("message", 1e5, 0.1, links=("other", "port"), way=1, traffic=Traffic.MESSAGE)
    clock.until(10.0)
    assert clock.ends["message"] == pytest.approx(0.1 + 0.1 + HOLD_S)
    assert clock.ends["sum"] == pytest.approx(1.1)


def test_the_message_that_is_due_first_has_the_entrance_to_itself() -> None:
    clock = Clock(Communication())
    clock.submit("later", 1e6, links=("one", "in"), way=1, traffic=Traffic.MESSAGE, entrance="in", due=5)
    clock.submit("first", 1e6, 0.1, links=("two", "in"), way=2, traffic=Traffic.MESSAGE, entrance="in", due=3)
    clock.submit("last", 1e6, 0.2, links=("three", "in"), way=3, traffic=Traffic.MESSAGE, entrance="in", due=7)
    clock.until(math.inf)
    # What the kernel holds of the one that stops still passes.
    assert clock.ends == pytest.approx({"first": 1.1 + HOLD_S, "later": 2.0, "last": 3.0}, abs=1e-3)


def test_what_one_slot_waits_for_shares_the_entrance() -> None:
    clock = Clock(Communication())
    clock.submit("one", 1e6, links=("one", "in"), way=1, traffic=Traffic.MESSAGE, entrance="in", due=3)
    clock.submit("two", 1e6, links=("two", "in"), way=2, traffic=Traffic.MESSAGE, entrance="in", due=3)
    clock.until(math.inf)
    assert clock.ends == pytest.approx({"one": 2.0, "two": 2.0})


def test_while_a_message_is_stopped_its_sender_sends_to_others() -> None:
    clock = Clock(Communication())
    clock.submit("later", 1e6, links=("out", "in"), traffic=Traffic.MESSAGE, entrance="in", due=5)
    clock.submit("elsewhere", 1e6, links=("out", "other"), traffic=Traffic.MESSAGE)
    clock.submit("first", 1e6, 0.5, links=("two", "in"), way=2, traffic=Traffic.MESSAGE, entrance="in", due=3)
    clock.until(math.inf)
    # What the kernel holds of the one that stops passes at half of the rate, beside the first.
    assert clock.ends == pytest.approx({"first": 1.5 + HOLD_S, "elsewhere": 1.5 + 2 * HOLD_S, "later": 2.0 + HOLD_S})


def test_sums_do_not_leave_a_port_to_a_message_that_leaves_room_there() -> None:
    clock = Clock(Communication())
    slow = Path(0.0, LINK / 10, (("port", LINK), ("slow", LINK / 10)))
    clock.submit("sum", 9e5, links=("port", "one"))
    clock.submit("message", 1e5, path=slow, way=1, traffic=Traffic.MESSAGE, holding=("slow",))
    clock.until(math.inf)
    assert clock.ends == pytest.approx({"sum": 1.0, "message": 1.0})


def test_a_message_that_is_over_sooner_holds_nothing() -> None:
    clock = Clock(Communication())
    clock.submit("sum", 1e6, links=("one", "port"), way=0)
    clock.submit("message", 1e3, 0.1, links=("other", "port"), way=1, traffic=Traffic.MESSAGE)
    clock.until(10.0)
    assert clock.ends["message"] == pytest.approx(0.1 + 2e-3)
    assert clock.ends["sum"] == pytest.approx(1.001)


def test_sums_wait_while_a_message_passes_and_begin_behind_it() -> None:
    clock = Clock(Communication())
    clock.submit("message", 1e6, links=("other", "port"), way=1, traffic=Traffic.MESSAGE)
    clock.submit("sum", 1e6, 0.1, links=("one", "port"), way=0)
    clock.submit("elsewhere", 1e6, 0.1, links=("two",), way=2)
    clock.until(10.0)
    assert clock.ends == pytest.approx({"message": 1.0, "elsewhere": 1.1, "sum": 2.0})


def test_a_way_that_was_held_sends_one_transfer_at_a_time() -> None:
    clock = Clock(Communication())
    clock.submit("other", 1e6, links=("other", "port"), way=1, traffic=Traffic.MESSAGE)
    for name in ("first", "second"):
        clock.submit(name, 1e6, 0.1, links=("one", "port"), way=0)
    clock.submit("own", 2e6, 0.2, links=("one",), way=0, traffic=Traffic.MESSAGE)  # is on its way when the port is free
    clock.until(10.0)
    assert clock.ends == pytest.approx({"other": 1.0, "own": 2.2, "first": 3.2, "second": 4.2})


def test_a_message_that_waits_for_a_sum_still_does_when_another_device_s_has_passed() -> None:
    clock = Clock(Communication(chunk_s=0.5))
    clock.submit("sum", 2e6, links=("one", "port"), way=0)
    clock.submit("own", 1e6, 0.1, links=("one", "port"), way=0, traffic=Traffic.MESSAGE)
    clock.submit("other", 1e3, 0.2, links=("other", "port"), way=1, traffic=Traffic.MESSAGE)
    clock.until(10.0)
    assert clock.ends["own"] == pytest.approx(1.501, abs=1e-3)


def test_without_turns_across_peers_a_message_shares_the_port_with_a_sum() -> None:
    clock = Clock(Communication(across_peers=False))
    clock.submit("late", 1e6, links=("one", "port"), way="one", deadline=9)
    clock.submit("early", 1e6, 1e-6, links=("one", "port"), way="one", deadline=3)
    clock.submit("message", 0.5e6, links=("other", "port"), way="other", traffic=Traffic.MESSAGE)
    clock.until(10.0)
    assert clock.ends["message"] == pytest.approx(1.0, abs=1e-3)
    assert clock.ends["early"] < clock.ends["late"] == pytest.approx(2.5, abs=1e-3)


def test_there_are_as_many_events_however_small_the_chunks() -> None:
    counts = []
    for chunk_s in (0.07, 0.7):
        clock = Clock(Communication(chunk_s=chunk_s))
        clock.submit("sum", 50e6)
        clock.submit("message", 1e6, 3.0, traffic=Traffic.MESSAGE)
        clock.until(100.0)
        assert clock.ends["sum"] == pytest.approx(51.0)
        counts.append(clock.num_pushed)
    assert counts[0] == counts[1] <= 5


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from("uvwxyz"), min_size=1, max_size=3), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=9
    ),
    st.booleans(),
)
def test_every_byte_passes_and_no_link_carries_more_than_it_can(flows: list[tuple[set[str], int, int]], scheduled: bool) -> None:
    clock = Clock(Communication(scheduled=scheduled, chunk_s=0.3))
    for number, (links, megabytes, start_s) in enumerate(sorted(flows, key=lambda flow: flow[2])):
        clock.submit(str(number), megabytes * LINK, float(start_s), links=sorted(links), way=number % 3, deadline=number % 2)
    clock.until(1e9)
    ordered = sorted(flows, key=lambda flow: flow[2])
    assert len(clock.ends) == len(flows)
    for link in "uvwxyz":
        of_link = [(flow, str(number)) for number, flow in enumerate(ordered) if link in flow[0]]
        if of_link:
            first_s = min(flow[2] for flow, _ in of_link)
            last_s = max(clock.ends[name] for _, name in of_link)
            assert last_s - first_s >= sum(flow[1] for flow, _ in of_link) - 1e-6
    for number, (_, megabytes, start_s) in enumerate(ordered):
        assert clock.ends[str(number)] >= start_s + megabytes - 1e-6


# Orders


def test_parts_of_sums_are_transfers_of_the_trace() -> None:
    schedule = build("pipedream-2bw", ScheduleRequest(2, 4, 3, update_scope=UpdateScope.STAGE))
    placement = Placement((((0, 0.5), (2, 0.5)), ((1, 0.5), (3, 0.5))))
    topology = ClusterTopology.uniform(4, bandwidth_bytes_per_s=10.0, latency_s=0.25)
    names = [device.name for device in topology.devices]
    alone = StageCost(forward_s=1.0, backward_s=2.0, weight_grad_s=1.0, parameter_bytes=30)
    cost = Cost(
        stages={(device, stage): alone for stage, members in enumerate(placement.workers) for device, _ in members},
        edge_bytes={(0, 1): 4},
        path=lambda source, target: topology.path(names[source], names[target]),
        devices=tuple(names),
    )
    trace = simulate_programs(lower(schedule, placement), cost, name="sums", num_updates=3)
    for link in ((0, 2), (2, 0), (1, 3), (3, 1)):
        spans = trace.by_link[link]
        assert {dimension(span.item) for span in spans} == {Dimension.SUM}
        assert sum(span.bytes for span in spans) == 3 * 30, "a ring of two sends all bytes once"
        assert all(span.end_s - span.start_s >= 1.5 + 0.25 - 1e-9 for span in spans)
    assert {dimension(span.item) for span in trace.by_link[0, 1]} == {Dimension.MESSAGE}
    awaited = [span for span in trace.spans if span.kind is SpanKind.COLLECTIVE]
    assert all(any(span.item == other.item and span.end_s >= other.end_s for other in trace.spans) for span in awaited)


def test_messages_of_one_link_pass_one_by_one_while_others_sum() -> None:
    # Gradients from stage 1 to 0 queue, as links are slower than stages; stage 2, which is done first, sums meanwhile.
    schedule = build("gpipe", ScheduleRequest(3, 8))
    placement = Placement((((0, 1.0),), ((1, 1.0),), ((2, 0.5), (3, 0.5))))
    topology = ClusterTopology.uniform(4, bandwidth_bytes_per_s=10.0, latency_s=0.25)
    names = [device.name for device in topology.devices]
    alone = StageCost(forward_s=1.0, backward_s=1.0, weight_grad_s=0.5, parameter_bytes=300)
    cost = Cost(
        stages={(device, stage): alone for stage, members in enumerate(placement.workers) for device, _ in members},
        edge_bytes={(0, 1): 40, (1, 2): 4},
        path=lambda source, target: topology.path(names[source], names[target]),
        devices=tuple(names),
    )
    trace = simulate_programs(lower(schedule, placement), cost, name="queued")
    gradients = sorted((span.start_s, span.end_s - 0.25) for span in trace.by_link[1, 0])
    assert len(gradients) == 8
    assert all(later[0] == pytest.approx(earlier[1]) for earlier, later in itertools.pairwise(gradients))


def test_a_path_that_passes_a_link_twice_takes_twice_of_it() -> None:
    # A route that enters and leaves a radio has half of its rate; whichever is first, both together take what they need of it.
    for order in (("twice", "once"), ("once", "twice")):
        clock = Clock(FAIR)
        for way, name in enumerate(order):
            path = Path(0.0, LINK / 2, (("radio", LINK / 2),)) if name == "twice" else Path(0.0, LINK, (("radio", LINK),))
            clock.submit(name, LINK, path=path, way=way)
        clock.until(math.inf)
        assert clock.ends["twice"] == pytest.approx(3.0)
        assert clock.ends["once"] == pytest.approx(3.0)


def _device_of_two_sums(num_bytes: int, *, are_stated: bool) -> Trace:
    """Device 0 holds copies of both stages of two pipelines, with device 2 and with device 1; pairs have stated links, or their port's."""
    forward, backward = OpKind.FORWARD, OpKind.BACKWARD
    programs = [
        [Op(forward, 0, 0, 0), Op(forward, 1, 1, 1), Op(backward, 1, 1, 1), Op(backward, 0, 0, 0)],
        [Op(forward, 1, 0, 0), Op(backward, 1, 0, 0)],
        [Op(forward, 0, 1, 1), Op(backward, 0, 1, 1)],
    ]
    schedule = synchronous_pipelines(
        "two", ScheduleRequest(3, 2, update_scope=UpdateScope.STAGE), pipelines=[(0, 1), (2, 0)], one_update=programs
    )
    topology = ClusterTopology.uniform(3, bandwidth_bytes_per_s=1e6, latency_s=0.0, devices_per_node=1)
    if are_stated:
        pairs = itertools.combinations([node.name for node in topology.nodes], 2)
        links = tuple(Link(source=one, target=other, bandwidth_bytes_per_s=1e6, latency_s=0.0) for one, other in pairs)
        topology = dataclasses.replace(topology, links=links)
    names = [device.name for device in topology.devices]
    stage = StageCost(forward_s=0.001, backward_s=0.001, weight_grad_s=0.0005, parameter_bytes=num_bytes)
    cost = Cost(
        stages={(device, number): stage for device, number in ((0, 0), (0, 1), (1, 1), (2, 0))},
        edge_bytes={(0, 1): 1000},
        path=lambda source, target: topology.path(names[source], names[target]),
        devices=tuple(names),
    )
    return simulate_programs(lower(schedule, Placement.even(3)), cost, name="two")


@pytest.mark.parametrize(("are_stated", "seconds"), [(False, 2.0), (True, 1.0)])
def test_sums_of_one_device_go_one_after_the_other_by_its_port_and_at_once_over_stated_links(*, are_stated: bool, seconds: float) -> None:
    trace = _device_of_two_sums(1_000_000, are_stated=are_stated)
    first, second = (sorted(span for span in trace.by_link[link] if dimension(span.item) is Dimension.SUM)[-1] for link in ((0, 1), (0, 2)))
    assert max(first.end_s, second.end_s) == pytest.approx(seconds, rel=0.02)


def test_a_sum_with_a_hop_without_a_limit_takes_the_wires_of_its_other_hops() -> None:
    def update_s(within: float | None) -> float:
        local = NodeLink(latency_s=0.0, bandwidth_bytes_per_s=within)
        nodes = tuple(Node(name=name, devices=tuple(Device(f"{name}{at}", "cpu") for at in range(2)), link=local) for name in "ab")
        topology = ClusterTopology(name="two", nodes=nodes, default_link=NodeLink(latency_s=0.0, bandwidth_bytes_per_s=1e6))
        profile = ModelProfile.uniform(
            8, microbatch_size=4, parameter_bytes=1 << 20, output_bytes=10, forward_s=0.01, backward_s=0.02, weight_grad_s=0.01
        )
        evaluation = LayoutEvaluator(Problem(profile, topology, 4, 4)).simulate(Layout((0, 8), ((0, 1, 2, 3),)))
        assert evaluation is not None
        return evaluation.update_s

    assert update_s(None) == pytest.approx(update_s(1e12), rel=1e-3)
