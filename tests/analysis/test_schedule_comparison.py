"""`raypipe schedules --devices D --microbatches M`: all schedules side by side on the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from raypipe import schedule_registry
from raypipe.analysis.schedule_comparison import compare_schedules
from raypipe.analysis.schedule_figures import StageSeconds
from raypipe.cli import main
from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Schedule, UpdateScope, WeightRule
from raypipe.schedules.request import ScheduleRequest
from raypipe.show.report import rows_table
from raypipe.show.schedules import comparison_report

Rows = dict[str, dict[str, Any]]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Rows, dict[str, str]]]:
    """The figures by name, and the reasons of those that are left out."""

    def call(*arguments: object) -> tuple[Rows, dict[str, str]]:
        assert main(["schedules", *map(str, arguments), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        rows = {row["schedule"]: row for row in document["schedules"]}
        refused = {row["schedule"]: row["reason"] for row in document["refused"]}
        assert {*rows, *refused} == {spec.name for spec in schedule_registry.specs()}
        assert len(document["schedules"]) + len(document["refused"]) == len(schedule_registry.specs())
        return rows, refused

    return call


def test_all_schedules_have_the_same_work(compare: Callable[..., tuple[Rows, dict[str, str]]]) -> None:
    rows, refused = compare("--devices", 4, "--microbatches", 8, "--latency", 0.25)
    assert set(refused) == {"pipedream", "branch-aware"}
    for name, row in rows.items():
        assert sum(row["busy_s"]) == pytest.approx(4 * 8 * 3)
        assert row["over_lower_bound"] >= 1 - 1e-9
        flushes = catalogue.spec(name).weight_rule is WeightRule.FLUSH
        assert row["steady_update_s"] == row["makespan_s"] if flushes else row["steady_update_s"] < row["makespan_s"]


def test_shares_messages_and_bounds_of_known_schedules(compare: Callable[..., tuple[Rows, dict[str, str]]]) -> None:
    rows, _ = compare("--devices", 4, "--microbatches", 8)
    one, interleaved, chimera = rows["1f1b"], rows["interleaved"], rows["chimera"]
    assert (one["makespan_s"], one["lower_bound_s"], one["over_lower_bound"]) == (33, 27, 33 / 27)
    assert one["peak_in_flight_shares"] == [4, 3, 2, 1]
    assert one["weight_copies_shares"] == [1] * 4
    # An activation and a gradient over each of three edges; the second device sends as many as the third.
    assert (one["messages_per_update"], one["max_device_messages_per_update"], one["relative_message_volume"]) == (48, 16, 1)
    assert interleaved["makespan_s"] == 28.5
    assert interleaved["peak_in_flight_shares"] == [5.5, 4.5, 3.5, 2.5]
    assert interleaved["weight_copies_shares"] == [1] * 4
    assert interleaved["relative_message_volume"] == pytest.approx(7 / 3)
    assert chimera["weight_copies_shares"] == [2] * 4
    assert rows["pipedream-2bw"]["weight_copies_shares"] == [2] * 4
    assert [rows[name]["max_delay"] for name in ("1f1b", "pipedream-2bw", "async-1f1b", "amdp", "amdp-flush")] == [0, 1, 1, 1, 0]
    assert (rows["amdp"]["max_mismatch"], rows["amdp"]["steady_update_s"], rows["amdp"]["num_pipelines"]) == (1, 26, 2)
    assert chimera["num_pipelines"] == 2


def test_halves_of_microbatches_are_more_messages_of_the_same_volume(compare: Callable[..., tuple[Rows, dict[str, str]]]) -> None:
    rows, _ = compare("--devices", 4, "--microbatches", 8)
    whole, halved = rows["chimera"], rows["chimera-halving"]
    assert halved["messages_per_update"] > whole["messages_per_update"]
    assert halved["relative_message_volume"] == pytest.approx(whole["relative_message_volume"])


@pytest.mark.parametrize(("name", "stages_a_device"), [("1f1b", 1), ("zb-h2", 1), ("interleaved", 2)])
def test_the_figures_are_those_of_the_schedule_with_stages_of_its_share(
    compare: Callable[..., tuple[Rows, dict[str, str]]], capsys: pytest.CaptureFixture[str], name: str, stages_a_device: int
) -> None:
    size = ("--devices", 3, "--microbatches", 6, "--updates", 2, "--latency", 0.5)
    rows, _ = compare(*size, "--forward", 2, "--backward", 6, "--weight-grad", 2)
    times = ("--forward", 2 / stages_a_device, "--backward", 6 / stages_a_device, "--weight-grad", 2 / stages_a_device)
    assert main(["schedule", name, *map(str, (*size, *times)), "--json"]) == 0
    for key, value in json.loads(capsys.readouterr().out).items():
        assert rows[name][key] == (pytest.approx(value) if isinstance(value, float | list) else value), key


def test_updates_that_overlap_are_compared_by_their_steady_time() -> None:
    def overlapping(size: ScheduleRequest) -> Schedule:
        return catalogue.build("zb-h2", replace(size, update_scope=UpdateScope.STAGE))

    spec = replace(catalogue.spec("zb-h2"), build=overlapping)
    (row,) = compare_schedules([spec], ScheduleRequest(4, 12), StageSeconds()).compared
    assert (row.figures.steady_update_s, row.lower_bound_s, row.over_lower_bound) == (36, 36, 1)
    assert row.figures.trace.makespan_s == 39


def test_an_order_for_one_window_alone_is_compared_by_that_window() -> None:
    def single(size: ScheduleRequest) -> Schedule:
        if size.num_updates != 2:
            raise ScheduleError("use --updates 2")
        return catalogue.build("zb-h2", replace(size, update_scope=UpdateScope.STAGE))

    spec = replace(catalogue.spec("zb-h2"), build=single)
    (row,) = compare_schedules([spec], ScheduleRequest(4, 12, 2), StageSeconds()).compared
    assert row.figures.steady_update_s == 36
    assert compare_schedules([spec], ScheduleRequest(4, 12), StageSeconds()).refused == (("zb-h2", "use --updates 2"),)


def test_what_refuses_the_size_says_why(compare: Callable[..., tuple[Rows, dict[str, str]]], capsys: pytest.CaptureFixture[str]) -> None:
    rows, refused = compare("--devices", 5, "--microbatches", 8)
    assert "1f1b" in rows
    assert "on an even number of devices, got 5" in refused["chimera"]
    assert main(["schedules", "--devices", "5", "--microbatches", "8"]) == 0
    assert f"chimera is left out: {refused['chimera']}" in " ".join(capsys.readouterr().out.split())
    _, refused = compare("--devices", 100, "--microbatches", 100_000)
    assert "gpipe" in refused
    assert "Ops" in refused["gpipe"]


def test_chunks_are_for_those_that_have_several(compare: Callable[..., tuple[Rows, dict[str, str]]]) -> None:
    rows, refused = compare("--devices", 4, "--microbatches", 8, "--chunks", 3)
    assert (rows["1f1b"]["num_stages"], rows["interleaved"]["num_stages"]) == (4, 12)
    assert "use --chunks 2" in refused["dualpipe-v"]


def test_rows_stand_by_makespan_or_as_in_the_catalogue(compare: Callable[..., tuple[Rows, dict[str, str]]]) -> None:
    rows, _ = compare("--devices", 4, "--microbatches", 8)
    assert [row["makespan_s"] for row in rows.values()] == sorted(row["makespan_s"] for row in rows.values())
    rows, _ = compare("--devices", 4, "--microbatches", 8, "--sort", "catalogue")
    assert list(rows) == [spec.name for spec in catalogue.SPECS if spec.name not in {"pipedream", "branch-aware"}]


def test_one_device_and_no_time_divide_by_nothing(compare: Callable[..., tuple[Rows, dict[str, str]]]) -> None:
    rows, _ = compare("--devices", 1, "--microbatches", 1, "--forward", 0, "--backward", 0)
    assert rows["1f1b"]["over_lower_bound"] is None
    assert (rows["1f1b"]["messages_per_update"], rows["1f1b"]["relative_message_volume"]) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--devices", "4"), "--devices needs --microbatches"),
        (("--microbatches", "4"), "--microbatches needs --devices"),
        (("--sort", "catalogue"), "--sort needs --devices and --microbatches"),
        (("--devices", "4", "--microbatches", "4", "--sort", "name"), "'--sort'"),
        (("--devices", "4", "--microbatches", "4", "--weight-grad", "3"), "--weight-grad 3 is more than --backward 2"),
    ],
)
def test_half_a_size_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str) -> None:
    assert main(["schedules", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert problem in output.err


def test_80_columns_tell_times_and_activations_in_one_line_and_the_rest_in_another() -> None:
    specs = [catalogue.spec(name) for name in ("1f1b", "async-interleaved")]
    compared = compare_schedules(specs, ScheduleRequest(8, 32), StageSeconds()).compared
    with (console := Console(width=80, color_system=None)).capture() as capture:
        console.print(rows_table(list(map(comparison_report, compared))))
    lines = [" ".join(line.split()) for line in capture.get().splitlines() if line.startswith("1f1b ")]
    assert lines == ["1f1b 117 s 117 s 17.9% x1.14 0 0 1..8", "1f1b 1 8 1 448 64 1.00"]


def test_a_long_name_is_folded_and_figures_are_not() -> None:
    spec = replace(catalogue.spec("1f1b"), name="n" * 90)
    (row,) = compare_schedules([spec], ScheduleRequest(8, 32), StageSeconds()).compared
    with (console := Console(width=80, color_system=None)).capture() as capture:
        console.print(rows_table([comparison_report(row)]))
    assert all(len(line) <= 80 for line in capture.get().splitlines())
    assert {"117", "17.9%", "x1.14", "1..8", "448"} <= set(capture.get().split())
