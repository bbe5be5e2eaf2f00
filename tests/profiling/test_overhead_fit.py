"""Planted costs are found again in a trace, and predictions with them fit other orders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath

import pytest

from raypipe.artifacts.calibration import Calibration, TransportCosts
from raypipe.artifacts.topology import NodeLink, Overheads, Path
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace
from raypipe.errors import FormatError
from raypipe.profiling.overhead_fit import Observations
from raypipe.schedules import catalogue
from raypipe.schedules.ir import OpKind, Schedule, UpdateScope
from raypipe.schedules.lower import Compute, DeviceProgram, Message, Recv, Send, lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import time_order

BEYOND = {OpKind.FORWARD: 0.125, OpKind.BACKWARD: 0.25, OpKind.INPUT_GRADIENT: 0.375, OpKind.WEIGHT_GRADIENT: 0.0625}
GAP_S, SEND_S, TAKE_S, CARRY_S = 0.01, 0.02, 0.005, 0.5
SEND_S_PER_BYTE, TAKE_S_PER_BYTE = 2e-6, 1e-6


def played(programs: Sequence[DeviceProgram], cost: Cost, size_bytes: int = 0, carry_s: float = CARRY_S) -> Trace:
    """A trace as stage actors write it, with planted costs: an item at a time on whichever device can go on."""
    heads = [0] * len(programs)
    clocks = [0.0] * len(programs)
    ends = [0.0] * len(programs)
    arrivals: dict[Message, float] = {}
    spans: list[Span] = []
    moved = True
    while moved:
        moved = False
        for device, program in enumerate(programs):
            while heads[device] < len(program.items):
                item = program.items[heads[device]]
                if isinstance(item, Recv) and item.message not in arrivals:
                    break
                now_s = clocks[device]
                match item:
                    case Compute():
                        start_s = now_s + GAP_S
                        clocks[device] = start_s + cost.compute_s(device, item.ops) + BEYOND.get(item.ops[0].kind, 0.0)
                        spans.append(Span(device, SpanKind.COMPUTE, item.ops, start_s, clocks[device]))
                        ends[device] = clocks[device]
                    case Send():
                        # Carried while it is handed over: the time of travel counts from the end of the Op.
                        arrivals[item.message] = ends[device] + carry_s
                        clocks[device] = now_s + SEND_S + SEND_S_PER_BYTE * size_bytes
                    case Recv():
                        start_s = now_s + GAP_S
                        clocks[device] = max(start_s, arrivals[item.message]) + TAKE_S + TAKE_S_PER_BYTE * size_bytes
                        spans.append(Span(device, SpanKind.RECV, item.message, start_s, clocks[device], size_bytes))
                heads[device] += 1
                moved = True
    return Trace("played", Source.MEASURED, tuple(map(str, range(len(programs)))), 1, tuple(spans))


def schedule(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    return catalogue.build(name, ScheduleRequest(num_devices, num_microbatches, 2, update_scope=UpdateScope.STAGE))


def observed() -> TransportCosts:
    observations = Observations()
    for name, size_bytes, carry_s in (("1f1b", 1000, CARRY_S), ("zb-h1", 1000, CARRY_S), ("1f1b", 5000, CARRY_S + 0.25)):
        order = schedule(name, 3, 7)
        programs, cost = lower(order), equal_stages(order, backward_s=3.0)
        observations.add(programs, played(programs, cost, size_bytes, carry_s), cost)
    return observations.costs()


def test_planted_costs_are_found() -> None:
    found = observed()
    assert found.overheads.forward_s == pytest.approx(0.125 + GAP_S)
    assert found.overheads.backward_s == pytest.approx(0.25 + GAP_S)
    assert found.overheads.input_grad_s == pytest.approx(0.375 + GAP_S)
    assert found.overheads.weight_grad_s == pytest.approx(0.0625 + GAP_S)
    assert found.overheads.send_s == pytest.approx(SEND_S)
    assert found.overheads.send_s_per_byte == pytest.approx(SEND_S_PER_BYTE)
    assert found.overheads.recv_s == pytest.approx(TAKE_S + GAP_S)
    assert found.overheads.recv_s_per_byte == pytest.approx(TAKE_S_PER_BYTE)
    assert found.link.bandwidth_bytes_per_s == pytest.approx(4000 / 0.25)
    assert found.link.latency_s == pytest.approx(CARRY_S - 0.25 / 4)


@pytest.mark.parametrize(("name", "num_devices", "num_microbatches"), [("gpipe", 2, 4), ("1f1b", 4, 9), ("zb-h2", 5, 12)])
def test_other_orders_are_predicted_with_them(name: str, num_devices: int, num_microbatches: int) -> None:
    order = schedule(name, num_devices, num_microbatches)
    programs, cost = lower(order), equal_stages(order, backward_s=3.0)
    measured_s = played(programs, cost).makespan_s
    found = observed()
    link = Path(CARRY_S)
    with_overheads = Cost(
        devices=cost.devices, stages=cost.stages, edge_bytes={}, path=lambda _source, _target: link, overheads=found.overheads
    )
    without_s = time_order(
        CompiledOrder(programs), Cost(devices=cost.devices, stages=cost.stages, edge_bytes={}, path=lambda _a, _b: link)
    ).makespan_s
    predicted_s = time_order(CompiledOrder(programs), with_overheads).makespan_s
    assert predicted_s == pytest.approx(measured_s, rel=0.005)
    assert abs(without_s / measured_s - 1) > 0.05


def test_one_size_of_message_tells_no_bandwidth() -> None:
    order = schedule("1f1b", 2, 4)
    programs, cost = lower(order), equal_stages(order)
    observations = Observations()
    observations.add(programs, played(programs, cost, 1000), cost)
    assert observations.costs().link.bandwidth_bytes_per_s is None


def test_nothing_seen_costs_nothing() -> None:
    assert Observations().costs() == TransportCosts(overheads=Overheads(), link=NodeLink(latency_s=0.0))


def test_a_calibration_goes_through_its_file_and_names_what_it_lacks(tmp_path: FilePath) -> None:
    calibration = Calibration(host="lab", date="2026-01-01", versions={"torch": "2.13"}, transports={"shm": observed()})
    calibration.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == calibration
    with pytest.raises(FormatError, match=r"'gloo'.*raypipe calibrate"):
        calibration.of("gloo")
    with pytest.raises(FormatError, match=r"nowhere.json: there is no such file; `raypipe calibrate` writes one"):
        Calibration.load(tmp_path / "nowhere.json")
