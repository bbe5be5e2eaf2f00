from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.errors import ScheduleError
from raypipe.planning import layout_schedules
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, OpKind, Schedule, Slot
from raypipe.schedules.lower import Placement, Send, lower
from raypipe.schedules.request import ScheduleRequest
from tests.planning.instances import all_plans, divided, random_problem

# SPP's own model (papers' section 2): stages and channels are resources of one chain, a channel carries one message at a time.


def list_makespan_s(times: list[tuple[float, float]], num_microbatches: int) -> float:
    """PE on a chain of resources with (forward, backward) seconds: each runs its Ops by slot, as soon as it can."""
    num_resources = len(times)
    lists = []
    for resource in range(num_resources):
        ops = [(i + resource, 0, i) for i in range(num_microbatches)]
        ops += [(i + 2 * num_resources - 2 - resource, 1, i) for i in range(num_microbatches)]
        lists.append([(kind, i) for _, kind, i in sorted(ops)])
    ends: dict[tuple[int, int, int], float] = {}
    heads, free_s = [0] * num_resources, [0.0] * num_resources
    progress = True
    while progress:
        progress = False
        for resource in range(num_resources):
            while heads[resource] < 2 * num_microbatches:
                kind, i = lists[resource][heads[resource]]
                needs = (0, resource - 1, i) if kind == 0 else (1, resource + 1, i) if resource + 1 < num_resources else (0, resource, i)
                if needs[1] >= 0 and needs not in ends:
                    break
                start_s = max(free_s[resource], ends.get(needs, 0.0) if needs[1] >= 0 else 0.0)
                free_s[resource] = ends[kind, resource, i] = start_s + times[resource][kind]
                heads[resource] += 1
                progress = True
    assert len(ends) == 2 * num_microbatches * num_resources, "the lists deadlock"
    return max(ends.values())


@given(
    times=st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.01, 5)), min_size=1, max_size=6),
    channels=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=5, max_size=5),
    num_microbatches=st.integers(1, 12),
)
def test_the_list_order_keeps_its_bound_in_the_papers_model(
    times: list[tuple[float, float]], channels: list[tuple[float, float]], num_microbatches: int
) -> None:
    chain = [times[0]]
    for channel, stage in zip(channels, times[1:], strict=False):
        chain += [channel, stage]
    busiest_s = max(forward_s + backward_s for forward_s, backward_s in chain)
    bound_s = (num_microbatches + 4 * len(times) - 4) * busiest_s
    makespan_s = list_makespan_s(chain, num_microbatches)
    assert num_microbatches * busiest_s * (1 - 1e-12) <= makespan_s <= bound_s * (1 + 1e-12)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 5), (4, 8), (5, 20), (3, 1)])
def test_the_schedule_is_the_list_of_the_even_resources(num_stages: int, num_microbatches: int) -> None:
    schedule = build("list", ScheduleRequest(num_stages, num_microbatches))
    for stage, program in enumerate(schedule.programs):
        slots = [(i + 2 * stage, 0, i) for i in range(num_microbatches)]
        slots += [(i + 4 * num_stages - 4 - 2 * stage, 1, i) for i in range(num_microbatches)]
        kinds = (OpKind.FORWARD, OpKind.BACKWARD)
        assert [op for op in program if isinstance(op, Op) and op.kind in kinds] == [
            Op(kinds[kind], stage, i) for _, kind, i in sorted(slots)
        ]


@pytest.mark.parametrize("seed", range(60))
def test_a_simulated_list_keeps_the_bound(seed: int) -> None:
    problem = random_problem(seed, num_devices=1 + seed % 5, num_layers=6, num_microbatches=1 + seed % 11, one_way=True)
    evaluator = LayoutEvaluator(problem)
    rng = random.Random(seed)
    plans = [layout for layout in divided(tuple(range(problem.num_devices)), problem.num_layers)]
    layout = rng.choice(plans)
    layout = Layout(layout.cuts, layout.workers, "list")
    judged = evaluator.simulate(layout)
    assert judged is not None
    stages = [evaluator.estimator.stage(group, *layout.cuts[n : n + 2]) for n, group in enumerate(layout.workers)]
    busiest_s, latency_s = max(stage[0] + stage[1] for stage in stages), 0.0
    for n in range(layout.num_stages - 1):
        ends = (layout.workers[n], layout.workers[n + 1])
        per_byte, latency_s, _, _ = evaluator.estimator.channel(*ends)
        back = evaluator.estimator.channel(*ends[::-1]).s_per_byte
        busiest_s = max(busiest_s, float(problem.crossing_bytes[layout.cuts[n + 1]]) * (per_byte + back))
    # A latency occupies nothing; each of the ways over 2N - 2 channels meets it once. The norm adds one more.
    bound_s = (problem.num_microbatches + 4 * layout.num_stages - 4) * (busiest_s + 2 * latency_s)
    summed_bytes = [problem.summed_prefix[end] - problem.summed_prefix[first] for first, end in itertools.pairwise(layout.cuts)]
    sums_s = [float(problem.sum_s(group, num_bytes)) for group, num_bytes in zip(layout.workers, summed_bytes, strict=True)]
    assert judged.update_s <= bound_s + max(sums_s) + 0.02


# Estimates


def test_equal_stages_without_messages_take_m_plus_n_minus_1() -> None:
    problem = Problem(ModelProfile.uniform(8, microbatch_size=4), ClusterTopology.uniform(8), num_microbatches=10, microbatch_size=4)
    evaluator = LayoutEvaluator(problem)
    for num_stages in (1, 2, 4, 8):
        step = 8 // num_stages
        cuts = tuple(range(0, 9, step))
        for order in ("1f1b", "list", "gpipe"):
            layout = Layout(cuts, tuple((device,) for device in range(num_stages)), order)
            judged = evaluator.simulate(layout)
            assert judged is not None
            assert judged.update_s == pytest.approx((10 + num_stages - 1) * 3 * step)
            assert evaluator.estimator.estimate_s(layout) == pytest.approx(judged.update_s)


def test_with_many_microbatches_the_busiest_resource_decides() -> None:
    times = []
    for num_microbatches in (8, 256):
        problem = random_problem(5, num_devices=4, num_layers=6, num_microbatches=num_microbatches)
        evaluator = LayoutEvaluator(problem)
        layout = Layout((0, 1, 3, 4, 6), ((0,), (1,), (2,), (3,)), "list")
        judged = evaluator.simulate(layout)
        assert judged is not None
        stages = [sum(evaluator.estimator.stage(group, *layout.cuts[n : n + 2])[:2]) for n, group in enumerate(layout.workers)]
        channels = [
            float(problem.crossing_bytes[layout.cuts[n + 1]]) * evaluator.estimator.channel(layout.workers[n], layout.workers[n + 1])[0]
            for n in range(3)
        ]
        times.append(judged.update_s / num_microbatches / max(*stages, *channels))
    assert times[1] == pytest.approx(1.0, abs=0.05)
    assert times[0] > times[1]


@pytest.mark.parametrize("seed", range(30))
def test_the_estimate_is_near_what_is_simulated(seed: int) -> None:
    problem = random_problem(seed, num_devices=4, num_layers=5, num_microbatches=1 + seed % 9)
    evaluator = LayoutEvaluator(problem)
    rng = random.Random(seed)
    ratios = []
    for layout in rng.sample(list(all_plans(4, 5)), 20):
        for order in ("1f1b", "list"):
            variant = Layout(layout.cuts, layout.workers, order)
            judged = evaluator.simulate(variant)
            assert judged is not None
            ratios.append(judged.update_s / evaluator.estimator.estimate_s(variant))
    assert min(ratios) > 0.85
    assert math.fsum(ratios) / len(ratios) < 1.15


# Rows


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(1, 40))
def test_rows_are_divided_as_well_as_can_be(speeds: list[float], num_rows: int) -> None:
    nodes = (Node(name="node", devices=tuple(Device(f"d{n}", "cpu", None, speed) for n, speed in enumerate(speeds))),)
    topology = ClusterTopology(name="t", nodes=nodes, default_link=NodeLink(latency_s=0.0))
    problem = Problem(ModelProfile.uniform(1), topology, 1, num_rows)
    rows = problem.rows(tuple(range(len(speeds))))
    if num_rows < len(speeds):
        assert rows is None
        return
    assert rows is not None
    assert sum(rows) == num_rows
    assert min(rows) >= 1
    # One after the other to whoever is done first, everybody one to begin with: the best division there is.
    best = [1] * len(speeds)
    queue = [(2 / speed, at) for at, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(num_rows - len(speeds)):
        _, at = heapq.heappop(queue)
        best[at] += 1
        heapq.heappush(queue, ((best[at] + 1) / speeds[at], at))
    slowest = [max(count / speed for count, speed in zip(counts, speeds, strict=True)) for counts in (rows, best)]
    assert slowest[0] == pytest.approx(slowest[1])


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 3), (4, 6), (3, 3), (5, 2)])
def test_workers_exchange_as_many_messages_as_borders_demand(sizes: tuple[int, int]) -> None:
    rows = 60
    shares = [
        tuple((device + first, rows // size / rows) for device in range(size)) for first, size in zip((0, sizes[0]), sizes, strict=True)
    ]
    programs = lower(build("1f1b", ScheduleRequest(2, 1)), Placement(tuple(shares)))
    sent = [item for program in programs for item in program.items if isinstance(item, Send)]
    assert len(sent) == 2 * (sum(sizes) - math.gcd(*sizes))


def test_transfers_that_share_a_wire_follow_each_other() -> None:
    nodes = tuple(
        Node(name=f"node{n}", devices=tuple(Device(f"d{n}-{at}", "cpu") for at in range(2)), link=NodeLink(latency_s=0.0)) for n in range(2)
    )
    topology = ClusterTopology(name="t", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=10.0, latency_s=0.5))
    problem = Problem(ModelProfile.uniform(2, output_bytes=100, microbatch_size=4), topology, 1, 4)
    evaluator = LayoutEvaluator(problem)
    # Each of two devices sends half of the bytes over the one wire between the nodes; within a node each pair has its own.
    per_byte, latency_s, _, _ = evaluator.estimator.channel((0, 1), (2, 3))
    assert per_byte == pytest.approx(0.1)
    assert latency_s == 0.5
    assert evaluator.estimator.channel((0,), (1,))[0] == 0.0


def test_updates_of_copies_wait_for_slow_sums_where_gradients_have_room() -> None:
    """Two stages with two copies each, whose sum takes half of an update's work (TriRace, Li et al., TPDS 2024, in small)."""
    rate, forward_s, num_microbatches = 25e6, 0.04, 8
    work_s = num_microbatches * 3 * forward_s / 2  # of one device
    num_bytes = int(rate * work_s / 2)
    layer = LayerProfile(
        name="a",
        forward_s=forward_s,
        backward_s=2 * forward_s,
        weight_grad_s=forward_s,
        output_bytes=1000,
        saved_bytes=1000,
        parameter_bytes=num_bytes,
    )
    profile = ModelProfile(name="two", microbatch_size=2, layers=(layer, replace(layer, name="b")))

    def simulated(memory_bytes: int | None, *, late: int | None = None) -> Evaluation:
        nodes = tuple(Node(name=f"n{i}", devices=(Device(name=f"n{i}/0", kind="gpu", memory_bytes=memory_bytes),)) for i in range(4))
        topology = ClusterTopology(name="t", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=rate, latency_s=0.0))
        problem = Problem(profile, topology, num_microbatches, 2, updates_per_window=10, max_staleness=1)
        evaluation = LayoutEvaluator(problem).simulate(Layout((0, 1, 2), ((0, 1), (2, 3)), "pipedream-2bw", late=late))
        assert evaluation is not None
        return evaluation

    early, late = simulated(None, late=0), simulated(None)
    assert late.timing.steady_update_s < 1.05 * work_s
    assert early.timing.steady_update_s > 1.45 * work_s
    # An update that waits holds its gradients beside those of the next one. Without room for both, it does not wait.
    needs = [max(evaluation.timing.peak_memory_bytes) for evaluation in (early, late)]
    assert needs[1] == pytest.approx(needs[0] + num_bytes, rel=0.01)
    crowded = simulated(needs[0])
    assert crowded.layout.late == 0
    assert crowded.timing.steady_update_s == early.timing.steady_update_s


def test_updates_that_wait_are_checked_where_stages_are_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_update(slot: Slot) -> bool:
        return isinstance(slot, Op) and slot.kind is OpKind.UPDATE

    def at_the_end(schedule: Schedule, _: int | None) -> Schedule:
        return replace(schedule, programs=tuple(tuple(sorted(program, key=is_update)) for program in schedule.programs))

    monkeypatch.setattr(layout_schedules, "late_updates", at_the_end)
    profile = ModelProfile.uniform(4, microbatch_size=2, output_bytes=1)
    first, *inner, last = profile.layers
    profile = replace(profile, layers=(replace(first, tied="w"), *inner, replace(last, tied="w")))
    problem = Problem(profile, ClusterTopology.uniform(4), 4, 2, max_staleness=1)
    with pytest.raises(ScheduleError):
        layout_schedules.layout_schedule(problem, Layout((0, 2, 4), ((0, 1), (2, 3)), "pipedream-2bw"), num_updates=4)
