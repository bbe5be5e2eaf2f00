"""Torch's own pipeline runtime takes our orders as they are, and its orders are ours where both know a schedule."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _Action,
    _add_send_recv,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
    _validate_schedule,
)

from raypipe.schedules import catalogue
from raypipe.schedules.ir import OpKind, Overlap, Schedule, Slot, ops_of
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.text import from_csv, to_csv, to_torch_csv
from raypipe.schedules.validate import validate
from tests import strategies

SIZES = [(1, 1), (1, 4), (2, 1), (2, 5), (3, 3), (4, 2), (4, 8), (5, 12)]
KINDS = {OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT}


def families(*, overlapping: bool) -> list[tuple[str, ScheduleRequest]]:
    """Names and sizes of the orders that torch can write; its dry run knows no slots whose Ops overlap."""
    found = []
    for name in strategies.SPEC_NAMES:
        for num_devices, num_microbatches in SIZES:
            for num_chunks in (1, 2, 3):
                size = ScheduleRequest(num_devices, num_microbatches, num_chunks=num_chunks)
                if strategies.takes(name, size):
                    slots = [slot for row in computation(catalogue.build(name, size)) for slot in row]
                    written = not any(op.pipeline or op.part for slot in slots for op in ops_of(slot))
                    if written and (overlapping or not any(isinstance(slot, Overlap) for slot in slots)):
                        found.append((name, size))
    return found


def computation(schedule: Schedule) -> tuple[tuple[Slot, ...], ...]:
    return tuple(tuple(slot for slot in program if ops_of(slot)[0].kind in KINDS) for program in schedule.programs)


def stub(**fields: object) -> Any:
    """As much of one of torch's stages or schedules as its orders ask for."""
    return SimpleNamespace(**fields)


def stages(num_devices: int, num_chunks: int) -> Any:
    """What the first rank holds."""
    num_stages = num_devices * num_chunks
    return [
        stub(num_stages=num_stages, group_size=num_devices, group_rank=0, is_last=False, stage_index=chunk) for chunk in range(num_chunks)
    ]


@pytest.mark.parametrize(("name", "size"), families(overlapping=True))
def test_torch_loads_our_order_adds_its_messages_and_gives_it_back(name: str, size: ScheduleRequest, tmp_path: Path) -> None:
    schedule = catalogue.build(name, size)
    path, dump = tmp_path / "order.csv", tmp_path / "dump.csv"
    path.write_text(to_torch_csv(schedule.programs))
    loaded: Any = _PipelineScheduleRuntime(stages(size.num_devices, size.num_chunks), size.num_microbatches)  # type: ignore[no-untyped-call]
    loaded._load_csv(str(path), format="compute_only")
    assert loaded.stage_index_to_group_rank == dict(enumerate(schedule.pipelines[0]))
    loaded._dump_csv(str(dump), format="compute_only")
    assert from_csv(dump.read_text(), path="dump.csv") == computation(schedule)


@pytest.mark.parametrize(("name", "size"), families(overlapping=False))
def test_torch_simulates_our_order_without_a_deadlock(name: str, size: ScheduleRequest) -> None:
    schedule = catalogue.build(name, size)
    workers = schedule.pipelines[0]
    actions = {worker: [_Action.from_str(str(slot)) for slot in program] for worker, program in enumerate(computation(schedule))}
    assert _validate_schedule(actions, size.num_devices, schedule.num_stages, size.num_microbatches) == dict(enumerate(workers))
    count = sum(map(len, actions.values()))
    with_messages = _add_send_recv(actions, lambda stage: workers[stage], schedule.num_stages)
    simulated = _simulate_comms_compute(with_messages, lambda stage: workers[stage], schedule.num_stages)
    done = [action for row in simulated.values() for action in row if action is not None and action.is_compute_op]
    assert len(done) == count


def torch_rows(order: dict[int, list[_Action | None]] | None) -> list[list[str]]:
    """The computation of torch's own order, as text."""
    assert order
    return [[str(action) for action in order[rank] if action is not None and action.is_compute_op] for rank in sorted(order)]


def our_rows(schedule: Schedule) -> list[list[str]]:
    return [[str(slot) for slot in program] for program in computation(schedule)]


@pytest.mark.parametrize(("num_devices", "num_microbatches"), SIZES)
def test_our_gpipe_is_torchs(num_devices: int, num_microbatches: int) -> None:
    order = ScheduleGPipe._get_pipeline_order(stub(_num_stages=num_devices, _n_microbatches=num_microbatches))
    assert torch_rows(order) == our_rows(catalogue.build("gpipe", ScheduleRequest(num_devices, num_microbatches)))


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 2), (2, 5), (4, 4), (4, 8), (5, 12)])
def test_our_1f1b_is_torchs_but_for_its_last_rank(num_devices: int, num_microbatches: int) -> None:
    order = Schedule1F1B._get_pipeline_order(stub(_num_stages=num_devices, _n_microbatches=num_microbatches))
    theirs, ours = torch_rows(order), our_rows(catalogue.build("1f1b", ScheduleRequest(num_devices, num_microbatches)))
    assert theirs[:-1] == ours[:-1]
    # Torch 2.13 counts the forwards of a rank without warm-up from 1 on: this form of its last rank runs 1F1 first.
    assert theirs[-1][0] in {ours[-1][0], f"{num_devices - 1}F1"}


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 1), (2, 2), (2, 6), (3, 3), (4, 2), (4, 3), (4, 8), (4, 10), (5, 15)])
def test_our_interleaved_is_torchs(num_devices: int, num_microbatches: int, num_chunks: int) -> None:
    schedule = catalogue.build("interleaved", ScheduleRequest(num_devices, num_microbatches, num_chunks=num_chunks))
    theirs = ScheduleInterleaved1F1B(stages(num_devices, num_chunks), num_microbatches)
    assert torch_rows(theirs.pipeline_order) == our_rows(schedule)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 2), (1, 5), (2, 4), (2, 5), (3, 6), (4, 8), (4, 13), (8, 20)])
def test_our_dualpipe_v_is_torchs(num_devices: int, num_microbatches: int) -> None:
    schedule = catalogue.build("dualpipe-v", ScheduleRequest(num_devices, num_microbatches, num_chunks=2))
    own = stub(pp_group_size=num_devices, _n_microbatches=num_microbatches)
    theirs = [ScheduleDualPipeV._calculate_single_rank_operations(own, rank) for rank in range(num_devices)]
    text = "\n".join(",".join(f'"{action}"' for action in row) for row in theirs)
    assert from_csv(text, path="torch.csv") == computation(schedule)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 1), (1, 5), (2, 3), (3, 4), (4, 6), (4, 7), (4, 8), (8, 12), (8, 20)])
def test_our_zb_v_is_torchs_where_it_has_no_gaps_to_fill(num_devices: int, num_microbatches: int) -> None:
    schedule = catalogue.build("zb-v", ScheduleRequest(num_devices, num_microbatches, num_chunks=2))
    own = stub(pp_group_size=num_devices, num_stages=2 * num_devices, _n_microbatches=num_microbatches)
    theirs = {rank: ScheduleZBVZeroBubble._calculate_single_rank_operations(own, rank) for rank in range(num_devices)}
    assert torch_rows(theirs) == our_rows(schedule)


@pytest.mark.parametrize("num_microbatches", [5, 7, 11])
def test_interleaved_takes_numbers_of_microbatches_that_torch_refuses(num_microbatches: int) -> None:
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        ScheduleInterleaved1F1B(stages(2, 2), num_microbatches)
    validate(catalogue.build("interleaved", ScheduleRequest(2, num_microbatches, num_chunks=2)))


def test_what_torch_writes_for_idle_slots_is_left_out() -> None:
    order = ScheduleGPipe._get_pipeline_order(stub(_num_stages=2, _n_microbatches=2))
    assert order
    rows = [["" if action is None else str(action) for action in row if action is None or action.is_compute_op] for row in order.values()]
    text = "\n".join(map(",".join, rows))
    assert to_csv(from_csv(text, path="torch.csv")) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
