"""The layers that wait for as long as a model's would compute, in threads of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from raypipe.actors.execution.batches import FixedBatch
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.execution.report import WindowReport
from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.trace import Span, SpanKind
from raypipe.models.rehearsing import LayerWaits, WaitingLayer, WaitingOptimizer, layers_per_stage, rehearsing
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import Direction, Message, Placement
from raypipe.schedules.request import ScheduleRequest
from tests.schedules.handwritten import pipedream_2bw, two_branches

ROWS = 6
WAITS = LayerWaits(forward_s=0.012, input_grad_s=0.008, weight_grad_s=0.02, num_parameters=1)
UPDATE_S = 0.005
SLACK_S = 0.02


def run(
    schedule: Schedule, *, widths: dict[tuple[int, int], int], waits: LayerWaits = WAITS, placement: Placement | None = None
) -> tuple[LocalPipeline, list[Span]]:
    """Two windows; the spans of the second."""
    graph = schedule.graph
    model = rehearsing(stages=[[waits]] * graph.num_stages, widths=widths, num_rows=ROWS)
    torch.set_num_threads(1)
    pipeline = LocalPipeline(
        model,
        cut=Cut.of_sizes(layers_per_stage([1] * graph.num_stages, graph.edges), model.edges()),
        schedule=schedule,
        batches=FixedBatch({"inputs": torch.zeros(ROWS, 1)}),
        optimizer=lambda weights: WaitingOptimizer({0: UPDATE_S}, 0, weights),
        learning_rate=lambda _: 0.0,
        placement=placement,
    )
    pipeline.run_window()
    reports: Sequence[WindowReport] = pipeline.run_window()
    return pipeline, [span for report, program in zip(reports, pipeline.programs, strict=True) for span in report.log.spans(program)]


def seconds(spans: list[Span], device: int, name: str) -> float:
    (found,) = (span for span in spans if span.device == device and span.name == name)
    return found.end_s - found.start_s


def test_the_layers_cut_by_stage_make_the_stage_graph() -> None:
    graph = two_branches(4).graph
    model = rehearsing(stages=[[WAITS]] * graph.num_stages, widths=dict.fromkeys(graph.edges, 3), num_rows=ROWS)
    assert Cut.of_sizes(layers_per_stage([1] * graph.num_stages, graph.edges), model.edges()).graph == graph
    assert model.layers[-1].name == f"stage-{graph.num_stages - 1}"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_each_kind_of_op_waits_for_its_own_time(name: str) -> None:
    _, spans = run(build(name, ScheduleRequest(2, 3)), widths={(0, 1): 50})
    expected = {"F": 0.012, "B": 0.028, "I": 0.008, "W": 0.02, "U": UPDATE_S}
    computed = [span for span in spans if span.kind is SpanKind.COMPUTE]
    assert {span.ops[0].kind for span in computed} == ({"F", "B", "U"} if name == "1f1b" else {"F", "I", "W", "U"})
    took_s: dict[tuple[str, int], list[float]] = {}
    for span in computed:
        took_s.setdefault((span.ops[0].kind, span.ops[0].stage), []).append(span.end_s - span.start_s)
    for (kind, _), several in took_s.items():
        assert min(several) >= expected[kind] - 1e-4
        # Forwards in threads of one process run one at a time: some wait for others, and all for whatever else the machine does.
        assert min(several) <= expected[kind] + SLACK_S


def test_messages_have_the_width_of_their_edge_and_both_ways_the_same_bytes() -> None:
    schedule = two_branches(4)
    widths = {edge: 10 * (1 + number) for number, edge in enumerate(schedule.graph.edges)}
    _, spans = run(schedule, widths=widths, waits=LayerWaits(0.0, 0.0, 0.0, 1))
    received = [span for span in spans if span.kind is SpanKind.RECV]
    messages = [span.item for span in received if isinstance(span.item, Message)]
    assert {message.direction for message in messages} == set(Direction)
    for span, message in zip(received, messages, strict=True):
        source, target = sorted((message.source, message.target))
        assert span.bytes == 4 * ROWS * widths[source, target]


def test_a_share_of_the_rows_waits_for_its_share_of_the_time() -> None:
    placement = Placement((((0, 1 / 3), (1, 2 / 3)), ((2, 1.0),)))
    _, spans = run(build("1f1b", ScheduleRequest(2, 2)), widths={(0, 1): 50}, placement=placement)
    assert 0.004 <= seconds(spans, 0, "0F0") <= 0.004 + SLACK_S
    assert 0.008 <= seconds(spans, 1, "0F0") <= 0.008 + SLACK_S


def test_the_fixed_part_of_a_wait_is_that_of_any_number_of_rows() -> None:
    waits = replace(LayerWaits(0.008, 0.0, 0.0, 2), fixed_share=0.5)
    layer = rehearsing(stages=[[waits]], widths={}, num_rows=4).layers[-1].build()
    assert isinstance(layer, WaitingLayer)
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypipe.models.rehearsing.sleep", slept.append)
        for num_rows in (4, 1):
            layer(torch.zeros(num_rows, 1))
    assert slept == pytest.approx([0.008, 0.008 * (0.5 + 0.5 / 4)])


def test_replicas_sum_gradients_of_the_size_of_the_weights() -> None:
    placement = Placement((((0, 0.5), (1, 0.5)), ((2, 1.0),)))
    waits = LayerWaits(0.0, 0.0, 0.0, num_parameters=1000)
    pipeline, spans = run(build("1f1b", ScheduleRequest(2, 2)), widths={(0, 1): 50}, waits=waits, placement=placement)
    num_weights = len(pipeline.weights[0][0].masters)  # of each is told whether there is a gradient
    assert {span.bytes for span in spans if span.name == "gradients of stage 0 for update 0"} == {4 * (1000 + num_weights)}
    stages = [weights.module for on_device in pipeline.weights for weights in on_device.values()]
    assert not any(weight.any() for stage in stages for weight in stage.parameters())


def test_versions_of_the_weights_are_no_hindrance() -> None:
    _, spans = run(pipedream_2bw(2, 2, 3), widths={(0, 1): 5}, waits=LayerWaits(0.001, 0.001, 0.001, 1))
    assert len([span for span in spans if span.kind is SpanKind.COMPUTE]) == len(list(pipedream_2bw(2, 2, 3).ops()))


def test_memory_does_not_grow_with_the_microbatches() -> None:
    model = rehearsing(stages=[[LayerWaits(0.0, 0.0, 0.0, 1)]] * 2, widths={(0, 1): 1000}, num_rows=ROWS)
    port = model.layers[2].build()
    x = torch.zeros(ROWS, 1, requires_grad=True)
    first, second = port(x), port(x)
    assert first.data_ptr() == second.data_ptr()
    assert first.shape == (ROWS, 1000)
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (ROWS, 1)


def test_jobs_of_a_rehearsal_are_those_of_the_plan() -> None:
    schedule = build("chimera-halving", ScheduleRequest(4, 4))
    make = partial(run, schedule, widths=dict.fromkeys(schedule.graph.edges, 7), waits=LayerWaits(0.0, 0.0, 0.0, 9))
    pipeline, _ = make()
    assert pipeline.programs == executable_programs(schedule)
