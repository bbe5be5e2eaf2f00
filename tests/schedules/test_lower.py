"""Lowered programs say of every tensor where it comes from and where it goes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError, ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Await, CollectiveKind, Start
from raypipe.schedules.ir import Schedule, UpdateScope, ops_of
from raypipe.schedules.lower import Compute, DeviceProgram, Direction, Item, Message, Placement, Recv, Send, check_whole_losses, lower
from raypipe.schedules.passes import evaluation
from raypipe.schedules.request import ScheduleRequest
from tests import strategies
from tests.schedules import handwritten, reference


def text(item: Item) -> str:
    """An item as a line, such as `send activation 0->1 of microbatch 0 to 1`."""
    match item:
        case Compute():
            versions = ",".join(map(str, item.versions))
            return f"{item} v{versions}"
        case Send():
            return f"send {item.message} to {item.device}"
        case Recv():
            return f"recv {item.message} from {item.device}"
        case Start():
            return f"start {item.collective}"
        case Await():
            return f"await {item.collective}"


def lines(program: DeviceProgram) -> list[str]:
    return [text(item) for item in program.items]


def two_devices(shares: list[list[float]], *, num_microbatches: int = 2) -> tuple[Schedule, Placement]:
    """1F1B whose workers are several devices with these shares."""
    numbers = iter(range(100))
    placement = Placement(tuple(tuple((next(numbers), share) for share in worker) for worker in shares))
    return catalogue.build("1f1b", ScheduleRequest(len(shares), num_microbatches)), placement


def messages(programs: tuple[DeviceProgram, ...], direction: Direction, index: int) -> list[tuple[int, int, Message]]:
    return [
        (program.device, item.device, item.message)
        for program in programs
        for item in program.items
        if isinstance(item, Send) and item.message.direction is direction and item.message.index == index
    ]


def test_1f1b_of_two_devices_and_two_microbatches_is_lowered_item_by_item() -> None:
    first, second = lower(catalogue.build("1f1b", ScheduleRequest(2, 2)))
    assert lines(first) == [
        "0F0 v0",
        "send activation 0->1 of microbatch 0 to 1",
        "0F1 v0",
        "send activation 0->1 of microbatch 1 to 1",
        "recv gradient 1->0 of microbatch 0 from 1",
        "0B0 v0",
        "recv gradient 1->0 of microbatch 1 from 1",
        "0B1 v0",
        "start norm for update 0",
        "await norm for update 0",
        "0U0 v0",
    ]
    assert lines(second) == [
        "recv activation 0->1 of microbatch 0 from 0",
        "1F0 v0",
        "1B0 v0",
        "send gradient 1->0 of microbatch 0 to 0",
        "recv activation 0->1 of microbatch 1 from 0",
        "1F1 v0",
        "1B1 v0",
        "send gradient 1->0 of microbatch 1 to 0",
        "start norm for update 0",
        "await norm for update 0",
        "1U0 v0",
    ]


def test_stages_on_the_same_worker_send_nothing() -> None:
    (only,) = lower(catalogue.build("interleaved", ScheduleRequest(1, 2, num_chunks=3)))
    assert all(isinstance(item, Compute) for item in only.items)


def test_lowering_leaves_the_order_of_computation_alone() -> None:
    for name in strategies.SPEC_NAMES:
        schedule = catalogue.build(name, strategies.near(name, 3, 6, 2))
        for program in lower(schedule):
            computed = tuple(item.ops for item in program.items if isinstance(item, Compute))
            assert computed == tuple(map(ops_of, schedule.programs[program.worker]))


def test_the_last_use_of_each_version_is_known() -> None:
    program = lower(handwritten.pipedream(2, 3))[0]
    computed = {str(item): position for position, item in enumerate(program.items) if isinstance(item, Compute)}
    assert program.last_reads == {(0, 0): computed["0B1"], (0, 1): computed["0B2"], (0, 2): computed["0U2"]}


@pytest.mark.parametrize("first", range(1, 7))
@pytest.mark.parametrize("second", range(1, 7))
def test_equal_shares_need_as_many_messages_as_cuts_that_differ(first: int, second: int) -> None:
    programs = lower(*two_devices([[1 / first] * first, [1 / second] * second]))
    sent = messages(programs, Direction.ACTIVATION, 0)
    assert len(sent) == first + second - math.gcd(first, second)
    assert len(messages(programs, Direction.GRADIENT, 1)) == len(sent)


@given(data=st.data())
@settings(max_examples=40)
def test_rows_of_messages_are_a_partition_for_any_shares(data: st.DataObject) -> None:
    weights = [data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)) for _ in range(data.draw(st.integers(1, 3)))]
    shares = [[weight / sum(worker) for weight in worker] for worker in weights]
    schedule, placement = two_devices(shares, num_microbatches=3)
    programs = lower(schedule, placement)
    rows = {program.device: program.rows for program in programs}
    for stage in range(len(shares) - 1):
        for direction, source in ((Direction.ACTIVATION, stage), (Direction.GRADIENT, stage + 1)):
            sent = [one for one in messages(programs, direction, 1) if one[2].source == source]
            pieces = sorted(message.rows for _, _, message in sent)
            assert pieces[0][0] == 0
            assert pieces[-1][1] == 1
            assert all(end == start for (_, end), (start, _) in zip(pieces, pieces[1:], strict=False))  # noqa: RUF007
            for device, peer, message in sent:
                assert rows[device][0] <= message.rows[0] < message.rows[1] <= rows[device][1]
                assert rows[peer][0] <= message.rows[0] < message.rows[1] <= rows[peer][1]
    reference.check_one_order(reference.run(schedule, programs, seed=1).starts)


def test_a_replica_that_works_on_parts_gets_its_rows_of_each() -> None:
    schedule = handwritten.divided(catalogue.build("1f1b", ScheduleRequest(2, 1)), {0: 2})
    placement = Placement((((0, 0.5), (1, 0.5)), ((2, 1.0),)))
    whole, halves = lower(schedule), lower(schedule, placement)

    def sent(program: DeviceProgram) -> list[tuple[int, tuple[float, float]]]:
        return [(item.device, item.message.rows) for item in program.items if isinstance(item, Send)]

    assert sent(whole[0]) == [(1, (0.0, 0.5)), (1, (0.5, 1.0))]
    assert sent(whole[1]) == [(0, (0.0, 1.0))]
    assert sent(halves[0]) == [(2, (0.0, 0.25)), (2, (0.5, 0.75))]
    assert sent(halves[1]) == [(2, (0.25, 0.5)), (2, (0.75, 1.0))]
    assert sent(halves[2]) == [(0, (0.0, 0.25)), (0, (0.5, 0.75)), (1, (0.25, 0.5)), (1, (0.75, 1.0))]


def test_devices_of_one_worker_sum_their_gradients_before_the_norm() -> None:
    schedule, placement = two_devices([[0.5, 0.5], [1.0]])
    programs = lower(schedule, placement)
    assert [program.device for program in programs] == [0, 1, 2]
    assert [program.worker for program in programs] == [0, 0, 1]
    assert [program.rows for program in programs] == [(0.0, 0.5), (0.5, 1.0), (0.0, 1.0)]
    assert lines(programs[0])[-6:] == [
        "0B1 v0",
        "start gradients of stage 0 for update 0",
        "start norm for update 0",
        "await gradients of stage 0 for update 0",
        "await norm for update 0",
        "0U0 v0",
    ]
    starts = reference.run(schedule, programs).starts
    assert [collective.devices for collective in starts[0]] == [(0, 1), (0, 1, 2)]


def test_devices_may_be_numbered_in_any_order() -> None:
    schedule = catalogue.build("1f1b", ScheduleRequest(2, 3))
    programs = lower(schedule, Placement((((5, 1.0),), ((2, 0.25), (7, 0.75)))))
    assert [program.device for program in programs] == [2, 5, 7]
    reference.run(schedule, programs)


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        ((((0, 0.5),),), r"worker 0: the shares of its devices must sum to 1, got \[0.5\]"),
        (((),), r"worker 0: the shares of its devices must sum to 1, got \[\]"),
        ((((0, 1.5), (1, -0.5)),), "worker 0: device 1 has share -0.5"),
        ((((0, 1.0),), ((0, 1.0),)), "worker 1: device 0 has share 1.0 or serves two workers"),
    ],
)
def test_a_placement_that_does_not_add_up_is_refused(workers: tuple[tuple[tuple[int, float], ...], ...], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Placement(workers)


@given(schedule=strategies.schedules())
@settings(max_examples=40)
def test_channels_are_first_in_first_out(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for program in lower(schedule):
        for item in program.items:
            if isinstance(item, Send):
                sent.setdefault((program.device, item.device), []).append(item.message)
            elif isinstance(item, Recv):
                received.setdefault((item.device, program.device), []).append(item.message)
    assert received == sent
    assert all(max(Counter(queue).values()) == 1 for queue in sent.values())


@given(schedule=strategies.schedules(), data=st.data())
@settings(max_examples=40)
def test_any_schedule_runs_on_replicated_workers(schedule: Schedule, data: st.DataObject) -> None:
    numbers = iter(range(100))
    counts = [data.draw(st.integers(1, 3)) for _ in range(schedule.num_workers)]
    placement = Placement(tuple(tuple((next(numbers), 1 / count) for _ in range(count)) for count in counts))
    scoped = replace(schedule, update_scope=UpdateScope.STAGE)
    reference.run(scoped, lower(scoped, placement), seed=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("name", sorted(strategies.HANDWRITTEN))
@pytest.mark.parametrize("scope", UpdateScope)
def test_norms_are_taken_for_a_global_scope_only(name: str, scope: UpdateScope) -> None:
    schedule = replace(strategies.HANDWRITTEN[name](), update_scope=scope)
    kinds = {item.collective.kind for program in lower(schedule) for item in program.items if isinstance(item, Start)}
    assert (CollectiveKind.NORM in kinds) == (scope is UpdateScope.GLOBAL)


def test_a_single_device_meets_nobody() -> None:
    (only,) = lower(catalogue.build("1f1b", ScheduleRequest(1, 2)))
    assert lines(only) == ["0F0 v0", "0B0 v0", "0F1 v0", "0B1 v0", "0U0 v0"]


@given(schedule=strategies.schedules(), num_microbatches=st.integers(1, 9))
@settings(max_examples=40)
def test_evaluation_of_any_schedule_runs(schedule: Schedule, num_microbatches: int) -> None:
    forward = evaluation(schedule, num_microbatches=num_microbatches)
    programs = lower(forward)
    reference.run(forward, programs)
    assert not any(isinstance(item, Start | Await) for program in programs for item in program.items)


def shared_by_two(worker: int, *, num_workers: int) -> Placement:
    """The worker has two devices, every other one."""
    members, first = [], 0
    for number in range(num_workers):
        count = 2 if number == worker else 1
        members.append(tuple((first + device, 1 / count) for device in range(count)))
        first += count
    return Placement(tuple(members))


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        (catalogue.build("chimera", ScheduleRequest(4, 4)), Placement.even(4)),
        (catalogue.build("1f1b", ScheduleRequest(4, 4)), shared_by_two(1, num_workers=4)),
        (catalogue.build("branch-aware", ScheduleRequest(2, 2, branches=(1, 1), coupled=True)), Placement.even(2)),
    ],
)
def test_rows_may_be_divided_elsewhere_than_where_the_loss_is_taken(schedule: Schedule, placement: Placement) -> None:
    check_whole_losses(schedule, placement)


def test_parts_of_a_microbatch_are_refused_where_the_loss_needs_all_rows() -> None:
    schedule = catalogue.build("chimera-halving", ScheduleRequest(4, 4))
    with pytest.raises(ScheduleError, match=r"'chimera-halving' divides microbatch \d .* at stage 3, .* whole microbatches, such as 1f1b"):
        check_whole_losses(schedule, Placement.even(4))


@pytest.mark.parametrize(("name", "num_chunks", "worker"), [("1f1b", 1, 3), ("chimera", 1, 0), ("zb-v", 2, 0)])
def test_devices_that_share_rows_are_refused_where_the_loss_needs_all(name: str, num_chunks: int, worker: int) -> None:
    schedule = catalogue.build(name, ScheduleRequest(4, 4, num_chunks=num_chunks))
    with pytest.raises(PlanError, match=f"worker {worker} has 2 devices, .* give this worker one device"):
        check_whole_losses(schedule, shared_by_two(worker, num_workers=4))
