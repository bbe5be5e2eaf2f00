"""Rehearsals on Ray actors of one node: the plan's programs with waits, against the simulation at the same scales."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile, NamedEdge
from raypipe.artifacts.trace import Source, SpanKind, Trace
from raypipe.cli import main
from raypipe.config import ScalingConfig, Transport
from raypipe.errors import ConfigError
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, Schedule
from raypipe.schedules.lower import Message
from raypipe.schedules.passes import recompute, repeated
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.simulator import simulate
from raypipe.training.rehearsal import Rehearsal, rehearse
from tests.on_ray.plans import in_turn, lab, plan_of, this_node
from tests.schedules.handwritten import pipedream_2bw, two_branches

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

FORWARD_S = 0.02
ROWS = 6
OUTPUT_BYTES = 120_000


def layers(count: int, *, output_bytes: int = OUTPUT_BYTES, parameter_bytes: int = 40_000) -> ModelProfile:
    return ModelProfile.uniform(
        count,
        forward_s=FORWARD_S,
        backward_s=2 * FORWARD_S,
        output_bytes=output_bytes,
        parameter_bytes=parameter_bytes,
        microbatch_size=ROWS,
    )


def plan(shares: Sequence[Sequence[float]], schedule: Schedule, *, speeds: Sequence[float] = (), microbatch_size: int = ROWS) -> Plan:
    node = this_node()
    names = {f"{node}/{number}": speed for number, speed in enumerate(speeds)}
    topology = lab({node: sum(map(len, shares))}, speeds=names)
    profile = layers(schedule.num_stages)
    sizes = [1] * schedule.num_stages
    return plan_of(profile, topology, schedule, in_turn(node, shares), sizes=sizes, microbatch_size=microbatch_size)


def compute_s(done: Rehearsal, device: int, op: str) -> float:
    """The seconds of an Op on a device, in the window that was disturbed least."""
    return min(
        span.end_s - span.start_s
        for window in done.windows
        for span in window.by_device[device]
        if span.kind is SpanKind.COMPUTE and span.name == op
    )


def waits_as_predicted(done: Rehearsal) -> None:
    """No Op is shorter than predicted, and of those that are alike the least disturbed is hardly longer."""
    expected: dict[tuple[int, tuple[Op, ...]], float] = {}
    for device, spans in enumerate(done.predicted.by_device):
        expected |= {(device, span.ops): span.end_s - span.start_s for span in spans if span.kind is SpanKind.COMPUTE}
    least: dict[tuple[int, tuple[str, ...], float], float] = {}
    for window in done.windows:
        found = {
            (device, span.ops): span.end_s - span.start_s
            for device, spans in enumerate(window.by_device)
            for span in spans
            if span.kind is SpanKind.COMPUTE
        }
        assert found.keys() == expected.keys()
        for (device, ops), seconds in found.items():
            planned = expected[device, ops]
            assert seconds >= planned - 1e-4, ops
            alike = (device, tuple(f"{op.stage}{op.kind}" for op in ops), planned)
            least[alike] = min(least.get(alike, seconds), seconds)
    for alike, seconds in least.items():
        assert seconds <= 1.1 * alike[-1] + 0.02, alike


def check_bytes(done: Rehearsal) -> None:
    """The rows of every microbatch have, over all messages of its tensor, the bytes of the plan's edge to within two bytes a row."""
    sums: dict[Message, int] = {}
    for span in done.trace.spans:
        if isinstance(span.item, Message):
            tensor = span.item._replace(rows=(0.0, 1.0))
            sums[tensor] = sums.get(tensor, 0) + span.bytes
    assert len(sums) == 2 * done.plan.schedule.num_microbatches * done.trace.num_updates * (len(done.plan.stages) - 1)
    assert all(size == pytest.approx(OUTPUT_BYTES, abs=2 * ROWS) for size in sums.values())


@pytest.mark.parametrize("transport", [Transport.SHM, Transport.GLOO])
def test_a_rehearsal_takes_as_long_as_simulated(transport: Transport) -> None:
    chosen = plan(((1.0,),) * 3, build("1f1b", ScheduleRequest(3, 4)))
    done = rehearse(chosen, num_updates=3, scaling=ScalingConfig(transport=transport))
    assert (done.trace.source, done.predicted.source) == (Source.REHEARSED, Source.SIMULATED)
    assert done.trace.num_updates == done.predicted.num_updates == 3
    assert len(done.windows) == 3
    waits_as_predicted(done)
    check_bytes(done)
    # On cores that others may use, too; the tests of several nodes are closer.
    assert min(window.update_s for window in done.windows) == pytest.approx(done.predicted.update_s, rel=0.15)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "chimera", "dualpipe", "interleaved", "chimera-halving"])
def test_every_kind_of_op_waits_for_its_own_time(name: str) -> None:
    chunks = {"zb-v": 2, "interleaved": 2}.get(name, 1)
    done = rehearse(plan(((1.0,),) * 2, build(name, ScheduleRequest(2, 4, num_chunks=chunks))), num_updates=2, num_windows=1)
    waits_as_predicted(done)


def test_a_forward_that_is_run_again_waits_again() -> None:
    done = rehearse(plan(((0.5, 0.5), (1.0,)), recompute(build("1f1b", ScheduleRequest(2, 3)), (0,))), num_updates=2, num_windows=1)
    waits_as_predicted(done)
    check_bytes(done)
    assert compute_s(done, 0, "0R0") == pytest.approx(FORWARD_S / 2, abs=5e-3)


def test_replicas_wait_for_their_rows_on_devices_of_their_own_speed() -> None:
    chosen = plan(((1 / 3, 2 / 3), (1.0,)), build("1f1b", ScheduleRequest(2, 4)), speeds=(0.5, 1.0, 2.0))
    done = rehearse(chosen, num_updates=2)
    waits_as_predicted(done)
    assert compute_s(done, 0, "0F0") == pytest.approx(FORWARD_S * 2 / 3, abs=5e-3)
    assert compute_s(done, 1, "0F0") == pytest.approx(FORWARD_S * 2 / 3, abs=5e-3)
    assert compute_s(done, 2, "1F0") == pytest.approx(FORWARD_S / 2, abs=5e-3)
    check_bytes(done)
    (size,) = {span.bytes for span in done.trace.spans if span.kind is SpanKind.COLLECTIVE and span.name.startswith("gradients")}
    assert 40_000 < size < 40_100, "of each weight is told whether it has a gradient"


def test_scales_shorten_waits_and_messages_and_nothing_else() -> None:
    chosen = plan(((0.5, 0.5), (1.0,)), build("1f1b", ScheduleRequest(2, 4)))
    done = rehearse(chosen, num_updates=2, num_windows=1, time_scale=0.25, byte_scale=0.1)
    assert compute_s(done, 2, "1F0") == pytest.approx(FORWARD_S / 4, abs=3e-3)
    assert {span.bytes for span in done.trace.spans if span.kind is SpanKind.RECV} == {6_000}
    (size,) = {span.bytes for span in done.trace.spans if span.kind is SpanKind.COLLECTIVE and span.name.startswith("gradients of stage 0")}
    assert 4_000 < size < 4_100
    whole = simulate(dataclasses.replace(chosen, schedule=repeated(chosen.schedule, num_updates=2)))
    assert done.predicted.update_s < 0.3 * whole.update_s


def test_branches_have_messages_of_their_own_size() -> None:
    node = this_node()
    schedule = two_branches(4)
    base = layers(schedule.num_stages)
    sizes = {edge: 40_000 * (1 + number) for number, edge in enumerate(schedule.graph.edges)}
    profile = dataclasses.replace(
        base,
        named_edges=tuple(
            NamedEdge(producer=base.layers[source].name, consumer=base.layers[target].name, bytes=size)
            for (source, target), size in sizes.items()
        ),
    )
    workers = in_turn(node, ((1.0,),) * schedule.num_workers)
    chosen = plan_of(profile, lab({node: schedule.num_workers}), schedule, workers, sizes=[1] * schedule.num_stages, microbatch_size=ROWS)
    done = rehearse(chosen, num_updates=2, num_windows=1)
    waits_as_predicted(done)
    for span in done.trace.spans:
        if span.kind is SpanKind.RECV and isinstance(span.item, Message):
            source, target = sorted((span.item.source, span.item.target))
            assert span.bytes == pytest.approx(sizes[source, target], abs=4)


def test_an_asynchronous_order_is_rehearsed_as_a_whole() -> None:
    chosen = plan(((1.0,),) * 2, pipedream_2bw(2, 4, 3))
    done = rehearse(chosen, num_windows=1)
    assert done.trace.num_updates == 3
    waits_as_predicted(done)
    with pytest.raises(ConfigError, match=r"is of 3 updates, which run as a whole"):
        rehearse(chosen, num_updates=4)


def test_updates_wait_too() -> None:
    base = plan(((1.0,),) * 2, build("1f1b", ScheduleRequest(2, 2)))
    profile = dataclasses.replace(base.profile, layers=tuple(dataclasses.replace(layer, update_s=0.015) for layer in base.profile.layers))
    done = rehearse(dataclasses.replace(base, profile=profile, profile_digest=profile.digest), num_updates=2, num_windows=1)
    assert compute_s(done, 0, "0U1") == pytest.approx(0.015, abs=5e-3)
    waits_as_predicted(done)


def test_one_stage_on_one_device_is_a_plan_like_others() -> None:
    done = rehearse(plan(((1.0,),), build("gpipe", ScheduleRequest(1, 2))), num_updates=2, num_windows=1)
    waits_as_predicted(done)
    assert done.trace.bubble_ratio < 0.1


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_must_be_amounts(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"time_scale is .*expected a finite number > 0"):
        rehearse(plan(((1.0,),), build("gpipe", ScheduleRequest(1, 2))), time_scale=scale)


# The command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan(((0.5, 0.5), (1.0,)), build("1f1b", ScheduleRequest(2, 4))).save(path)
    return path


def test_the_command_prints_what_was_predicted_and_what_was_seen(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert main(["rehearse", str(file), "--updates", "2", "--time-scale", "0.5", "-o", str(trace), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["time_scale"], document["byte_scale"], document["num_updates"]) == (0.5, 1.0, 2)
    assert {"makespan_s", "update_s", "bubble_ratio", "busy_s"} <= document.keys() & document["predicted"].keys()
    assert len(document["busy_s"]) == len(document["predicted"]["busy_s"]) == 3
    predicted = document["predicted"]["update_s"]
    assert document["update_error"] == pytest.approx((predicted - document["update_s"]) / document["update_s"])
    assert Trace.load(trace).source is Source.REHEARSED


def test_the_command_shows_scales_and_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(file), "--updates", "2", "--time-scale", "0.2", "--byte-scale", "0.5"]) == 0
    shown = capsys.readouterr()
    assert "scales: time 0.2, bytes 0.5" in shown.out
    assert "update time" in shown.out
    assert "stage 0, device 0" in shown.out
    assert "error of the prediction" in shown.out
    assert "window 1 of 4" in shown.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("none.json",), "there is no such file"),
        (("{file}", "--time-scale", "0"), "--time-scale"),
        (("{file}", "--updates", "0"), "--updates"),
    ],
)
def test_the_command_refuses_bad_input(file: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str) -> None:
    assert main(["rehearse", *(argument.format(file=file) for argument in arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert problem in output.err


def test_late_rows_are_rehearsed_with_the_bytes_that_are_planned() -> None:
    base = plan([(0.5, 0.5), (1.0,)], build("pipedream-2bw", ScheduleRequest(2, 4, 5)))
    table = dataclasses.replace(base.profile.layers[0], gradient_rows=20, looked_up_rows=1000, looked_up_bytes=30_000, reread_share=0.5)
    profile = dataclasses.replace(base.profile, layers=(table, *base.profile.layers[1:]))
    done = rehearse(
        dataclasses.replace(base, profile=profile), num_windows=1, time_scale=0.1, scaling=ScalingConfig(transport=Transport.TCP)
    )

    def num_bytes(trace: Trace) -> dict[tuple[int, str], int]:
        sums = [span for span in trace.spans if span.kind is SpanKind.COLLECTIVE and span.name.startswith("gradients of stage 0")]
        return {(span.device, span.name): span.bytes for span in sums}

    found, planned = num_bytes(done.trace), num_bytes(done.predicted)
    awaited = [name for device, name in found if device == 0]
    assert [name.removeprefix("gradients of stage 0 for update ") for name in awaited] == [
        "0, due rows",
        "0, late rows",
        "1, due rows",
        "1, late rows",
        "2, due rows",
        "2, late rows",
        "3",
        "4",
    ]
    for key, planned_bytes in planned.items():
        # Besides, a sum has one number for each weight.
        assert abs(found[key] - planned_bytes) < 100
