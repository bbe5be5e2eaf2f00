"""The command line: its contract, its messages and its exit codes."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest

import raypipe.cli
from raypipe.artifacts.calibration import Calibration, TransportCosts
from raypipe.artifacts.plan import make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.schedule import load_schedule, to_json
from raypipe.artifacts.topology import ClusterTopology, Link, Node, NodeLink, Overheads, SharedLink
from raypipe.artifacts.topology import Device as TopologyDevice
from raypipe.artifacts.trace import Source, Trace
from raypipe.cli import COMMANDS, commands, main
from raypipe.errors import RunError
from raypipe.planning.balance import balanced_cut
from raypipe.schedules import catalogue
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.text import from_csv, to_csv, to_torch_csv
from raypipe.simulation.simulator import simulate

SCHEDULE_KEYS = {
    *("schedule", "num_devices", "num_stages", "num_pipelines", "num_microbatches", "num_updates", "makespan_s", "busy_s", "span_s"),
    *("idle_s", "bubble_ratio", "peak_in_flight", "weight_copies", "max_mismatch", "max_delay", "steady_update_s"),
}
PER_DEVICE = ("busy_s", "span_s", "idle_s", "peak_in_flight", "weight_copies")


@dataclass(frozen=True)
class Ran:
    """What a command returned and wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


def refused(ran: Ran) -> str:
    """The message of a command that refused its input, after checking that it did so as promised."""
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert "Traceback" not in ran.err
    return ran.err


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """One valid file of each kind that commands read."""
    profile = ModelProfile.uniform(4, forward_s=0.01, backward_s=0.02, output_bytes=1000, saved_bytes=500, parameter_bytes=2000)
    topology = ClusterTopology.uniform(2, latency_s=0.001, bandwidth_bytes_per_s=1e6, memory_bytes=10**6, devices_per_node=1)
    schedule = catalogue.build("zb-h1", ScheduleRequest(2, 4, 3))
    plan = make_plan(
        name="small",
        planner="balanced",
        cut=balanced_cut(profile, 2),
        schedule=schedule,
        profile=profile,
        topology=topology,
        devices=("device0", "device1"),
        microbatch_size=1,
    )
    paths = {kind: tmp_path / name for kind, name in FILE_NAMES.items()}
    plan.save(paths["plan"])
    profile.save(paths["profile"])
    topology.save(paths["topology"])
    paths["schedule"].write_text(to_json(schedule))
    paths["csv"].write_text(to_csv(schedule.programs))
    simulate(plan).save(paths["trace"])
    return paths


FILE_NAMES = {
    "plan": "plan.json",
    "profile": "profile.json",
    "topology": "topology.yaml",
    "schedule": "schedule.json",
    "csv": "schedule.csv",
    "trace": "trace.json",
}

# The command as a whole


@pytest.fixture
def wide_files(tmp_path: Path) -> dict[str, Path]:
    """Files with long names: a profile, and a cluster of two nodes with a plan that takes all of it, predicted and measured."""
    layers = [replace(layer, name=f"transformer.block.{layer.name}") for layer in ModelProfile.uniform(8, saved_bytes=10**9).layers]
    nodes = tuple(
        Node(
            name=name,
            devices=tuple(TopologyDevice(f"{name}/{slot}", "NVIDIA H100 80GB HBM3", 80 * 10**9) for slot in range(4)),
            link=NodeLink(bandwidth_bytes_per_s=3e11, latency_s=1e-5),
            cores=64,
        )
        for name in ("ip-10-0-100-201.internal", "ip-10-0-100-202.internal")
    )
    profile = ModelProfile(name="wide", microbatch_size=4, layers=tuple(layers))
    between = Link(source=nodes[0].name, target=nodes[1].name, bandwidth_bytes_per_s=1.25e9, latency_s=1e-3)
    uplink = SharedLink(name="uplink", bandwidth_bytes_per_s=1e9, members=((nodes[0].name, nodes[1].name),))
    topology = ClusterTopology(name="wide", nodes=nodes, links=(between,), shared_links=(uplink,))
    plan = make_plan(
        name="wide",
        planner="balanced",
        cut=balanced_cut(profile, 8),
        schedule=catalogue.build("chimera", ScheduleRequest(8, 16)),
        profile=profile,
        topology=topology,
        devices=tuple(device.name for device in topology.devices),
        microbatch_size=4,
    )
    trace = simulate(plan)
    paths = {kind: tmp_path / f"wide-{name}" for kind, name in {**FILE_NAMES, "measured": "measured.json"}.items()}
    plan.save(paths["plan"])
    profile.save(paths["profile"])
    topology.save(paths["topology"])
    paths["schedule"].write_text(to_json(plan.schedule))
    trace.save(paths["trace"])
    replace(trace, source=Source.MEASURED).save(paths["measured"])
    return paths


GNMT = Path(__file__).parents[2] / "benchmarks/data/pipedream_profiles/gnmt.graph.txt"


@pytest.mark.parametrize(
    "command",
    [
        "schedules",
        "schedules --devices 4 --microbatches 8",
        "schedule interleaved --devices 8 --microbatches 16 --chunks 4",
        "schedule amdp --devices 8 --microbatches 32 --updates 4",
        "schedule gpipe --devices 50 --microbatches 50 --forward 0.0123",
        "show schedule",
        "show plan",
        "show topology",
        "show profile",
        "show trace",
        "show trace measured",
        "simulate plan",
        "plan --profile profile --topology topology --microbatches 8 --schedule 1f1b --effort 0.05 --compare",
        f"profile --from-pipedream {GNMT} --microbatch-size 128 --chain --max-crossing 3 -o out.json",
    ],
)
def test_a_terminal_of_80_columns_is_enough(
    run: Run, wide_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    name, *arguments = command.split()
    ran = run(name, *(wide_files.get(word, word) for word in arguments))
    assert ran.code == 0, ran.err
    assert [line for line in ran.out.splitlines() if len(line) > 80] == []


PAGE = (Path(__file__).parents[2] / "docs/schedules.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", re.findall(r"^    \$ raypipe (schedules? [^\n]*--devices [48] .*)$", PAGE, re.MULTILINE))
def test_the_page_on_schedules_shows_what_is_printed(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = PAGE.partition(f"    $ raypipe {command}\n")[2].splitlines()
    printed = [f"    {line}".rstrip() for line in run(*command.split()).out.splitlines()]
    assert shown[: len(printed)] == printed


def in_process(
    *arguments: str, code: str = "from raypipe.cli import main; import sys; sys.exit(main())"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=50)


def test_raypipe_can_be_run_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "raypipe", "--version"], capture_output=True, text=True, check=True, timeout=50)
    assert ran.stdout == f"raypipe {raypipe.__version__}\n"


def test_schedule_starts_without_what_takes_long_to_load() -> None:
    code = (
        "import sys; from raypipe.cli import main; code = main(); "
        "assert not {'ray', 'torch', 'numpy', 'scipy', 'pyarrow', 'svg', 'cupy'} & sys.modules.keys(); sys.exit(code)"
    )
    ran = in_process("schedule", "1f1b", "--devices", "2", "--microbatches", "2", code=code)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("1f1b: 2 devices")


def test_without_arguments_the_commands_are_listed(run: Run) -> None:
    ran = run()
    assert ran.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in ran.out


def every_command() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in COMMANDS:
        command = commands.get_command(click.Context(commands), name)
        assert command is not None
        found += [(name, inner) for inner in command.commands] if isinstance(command, click.Group) else [(name,)]
    return found


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_every_command_has_help_with_an_example_and_takes_json(run: Run, command: tuple[str, ...]) -> None:
    ran = run(*command, "--help")
    assert ran.code == 0
    assert "Example:\n  " in ran.out
    assert f"raypipe {' '.join(command)}" in ran.out.partition("Example:")[2]
    assert "--json" in ran.out


def test_unknown_commands_and_options_name_the_nearest(run: Run) -> None:
    assert "no command is called 'schedul'; did you mean 'schedule'?" in refused(run("schedul"))
    assert "--devices" in refused(run("schedule", "1f1b", "--device", 4))  # in click's words, which change
    assert "did you mean '1f1b'?" in refused(run("schedule", "1f2b", "--devices", 4, "--microbatches", 8))


def test_a_missing_option_is_named(run: Run) -> None:
    assert "--microbatches" in refused(run("schedule", "1f1b", "--devices", 4))


def test_a_failure_while_running_is_one_message_and_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunError("the network is down")

    monkeypatch.setattr("raypipe.cli.schedule.figures_of", fail)
    assert run("schedule", "1f1b", "--devices", 2, "--microbatches", 2) == Ran(1, "", "error: the network is down\n")


def test_ctrl_c_gives_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raypipe.cli.schedule.figures_of", interrupt)
    ran = run("schedule", "1f1b", "--devices", 2, "--microbatches", 2)
    assert (ran.code, ran.out) == (130, "")
    assert "Traceback" not in ran.err


def test_a_signal_from_the_terminal_gives_130() -> None:
    code = (
        "import os, signal, sys, raypipe.cli.schedule as module\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "module.figures_of = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n"
        "from raypipe.cli import main\n"
        "sys.exit(main())"
    )
    ran = in_process("schedule", "1f1b", "--devices", "2", "--microbatches", "2", code=code)
    assert (ran.returncode, ran.stdout) == (130, "")
    assert "Traceback" not in ran.stderr


def test_a_reader_that_stops_reading_causes_no_noise() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "raypipe", "schedule", "gpipe", "--devices", "8", "--microbatches", "99"]
    for more in ([], ["--json"], ["--format", "csv"]):
        ran = subprocess.run([*command, *more], stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=50)
        assert ran.stderr == ""
        assert ran.returncode in {1, -signal.SIGPIPE}
    os.close(writing)


# schedule


@pytest.mark.parametrize("name", [spec.name for spec in catalogue.SPECS])
def test_schedule_prints_every_figure_of_the_contract(run: Run, name: str) -> None:
    count = 1 if name == "pipedream" else 8
    branches = ("--branches", "1,1") if name == "branch-aware" else ()
    figures = run("schedule", name, "--devices", 4, "--microbatches", count, "--updates", 2, *branches, "--json").document
    assert figures.keys() >= SCHEDULE_KEYS
    assert figures["schedule"] == name
    assert (figures["num_devices"], figures["num_microbatches"], figures["num_updates"]) == (4, count, 2)
    assert all(len(figures[key]) == 4 for key in PER_DEVICE)
    for idle, span, busy in zip(figures["idle_s"], figures["span_s"], figures["busy_s"], strict=True):
        assert idle == span - busy


@pytest.mark.parametrize(
    ("name", "more", "makespan_s", "busy_s", "peak_in_flight"),
    [
        ("gpipe", (), 33, 24, [8, 8, 8, 8]),
        ("1f1b", (), 33, 24, [4, 3, 2, 1]),
        ("interleaved", (), 57, 48, [11, 9, 7, 5]),
        ("interleaved", ("--chunks", "2"), 57, 48, [11, 9, 7, 5]),
        ("zb-h1", ("--microbatches", "12"), 39, 36, [4, 4, 4, 4]),
        ("zb-h2", ("--microbatches", "12"), 39, 36, [7, 7, 7, 7]),
        ("zb-v", ("--microbatches", "12"), 75, 72, [8, 8, 8, 8]),
        ("zb-auto", ("--microbatches", "12", "--max-in-flight", "5"), 39, 36, [4, 4, 4, 4]),
        ("chimera", (), 30, 24, [3, 4, 4, 3]),
        ("chimera", ("--pipelines", "4"), 24, 24, [4, 4, 4, 4]),
        ("chimera-doubling", (), 28, 24, [7, 8, 8, 7]),
        ("chimera-halving", (), 26, 24, [4, 4, 4, 4]),
        ("dualpipe", (), 26, 24, [5, 5, 5, 5]),
        ("dualpipe-v", (), 54, 48, [9, 9, 9, 9]),
    ],
)
def test_schedule_reproduces_the_anchors(
    run: Run, name: str, more: tuple[str, ...], makespan_s: float, busy_s: float, peak_in_flight: list[int]
) -> None:
    figures = run("schedule", name, "--devices", 4, "--microbatches", 8, *more, "--json").document
    assert figures["makespan_s"] == makespan_s
    assert figures["busy_s"] == [busy_s] * 4
    assert figures["peak_in_flight"] == peak_in_flight
    assert figures["bubble_ratio"] == pytest.approx(1 - busy_s / max(figures["span_s"]))


@pytest.mark.parametrize(("name", "idle_s"), [("zb-h1", [9, 6, 3, 0]), ("zb-h2", [6, 4, 2, 0])])
def test_schedule_takes_the_full_backward_and_the_weight_gradient_as_a_part_of_it(run: Run, name: str, idle_s: list[float]) -> None:
    """F, I, W = 2, 2, 1."""
    times = ("--forward", 2, "--backward", 3, "--weight-grad", 1)
    assert run("schedule", name, "--devices", 4, "--microbatches", 12, *times, "--json").document["idle_s"] == idle_s


@pytest.mark.parametrize(("name", "small", "large"), [("1f1b", 0.2431, 0.2646), ("zb-h1", 0.1585, 0.1421), ("zb-h2", 0.1083, 0.0641)])
def test_schedule_reproduces_the_bubbles_of_the_zero_bubble_paper(run: Run, name: str, small: float, large: float) -> None:
    """Qi et al., 2024, arXiv 2401.10241, tables 5 and 9, with its latency as `--latency`."""
    for devices, microbatches, (forward, input_grad, weight_grad, latency), expected in (
        (8, 24, (18.522, 18.086, 9.337, 0.601), small),
        (32, 96, (10.419, 10.207, 7.715, 0.408), large),
    ):
        times = ("--forward", forward, "--backward", input_grad + weight_grad, "--weight-grad", weight_grad, "--latency", latency)
        figures = run("schedule", name, "--devices", devices, "--microbatches", microbatches, *times, "--json").document
        assert round(figures["bubble_ratio"], 4) == expected


def test_schedule_searches_with_the_times_and_the_limit_of_the_options(run: Run) -> None:
    """ZB-2p of the same paper."""
    times = ("--forward", 18.522, "--backward", 18.086 + 9.337, "--weight-grad", 9.337, "--latency", 0.601, "--update-scope", "stage")
    limit = ("--max-in-flight", 16, "--weight-grad-share", 0.5)
    figures = run("schedule", "zb-auto", "--devices", 8, "--microbatches", 24, *times, *limit, "--json").document
    assert round(figures["bubble_ratio"], 4) == 0.0433
    assert run("schedule", "zb-auto", "--devices", 8, "--microbatches", 24, *times, "--json").document["bubble_ratio"] > 0.1


def test_the_steady_time_tells_the_scopes_apart(run: Run) -> None:
    def figures(*more: object) -> Any:
        return run("schedule", "zb-h2", "--devices", 4, "--microbatches", 12, *more, "--json").document

    assert figures("--update-scope", "stage", "--updates", 6)["steady_update_s"] == 12 * 3
    assert figures("--update-scope", "global", "--updates", 6)["steady_update_s"] == figures()["makespan_s"]
    # Whatever the window that was asked for: the figure is that of a long one.
    assert figures("--update-scope", "stage")["steady_update_s"] == 12 * 3
    assert figures()["update_scope"] == "global"


def test_weight_gradients_take_half_of_the_backward_unless_told_otherwise(run: Run) -> None:
    command = ("schedule", "zb-h1", "--devices", 4, "--microbatches", 6, "--backward", 6, "--json")
    assert run(*command).document == run(*command, "--weight-grad", 3).document
    assert run(*command).document != run(*command, "--weight-grad", 2).document


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--devices", "0"), "'--devices'"),
        (("--devices", "-3"), "'--devices'"),
        (("--devices", "four"), "'--devices'"),
        (("--microbatches", "1e3"), "'--microbatches'"),
        (("--updates", "0"), "'--updates'"),
        (("--chunks", "0"), "'--chunks'"),
        (("--pipelines", "-1"), "'--pipelines'"),
        (("--forward", "-1"), "-1 is not a time"),
        (("--forward", "nan"), "nan is not a time"),
        (("--backward", "inf"), "inf is not a time"),
        (("--backward", "1e300"), "1e300 is not a time"),
        (("--latency", "-0.1"), "-0.1 is not a time"),
        (("--latency", "soon"), "'soon' is not a number of seconds"),
        (("--weight-grad", "3"), "--weight-grad 3 is more than --backward 2, of which it is a part"),
        (("--update-scope", "all"), "'--update-scope'"),
        (("--chunks", "2"), "1f1b holds one stage a device"),
        (("--pipelines", "2"), "1f1b has one pipeline"),
        (("--devices", str(10**30)), "'--devices'"),
        (("--devices", "5000"), "5000 stages are too many to simulate; use at most 1024"),
        (
            ("--devices", "64", "--pipelines", "64"),
            "64 pipelines of 64 stages are 4096 copies of a stage, too many to simulate; use at most 1024",
        ),
        (("--microbatches", "1000000"), "4 stages with 1000000 microbatches for 9 updates"),
        (("--format", "pdf"), "'--format'"),
        (
            ("-o", "drawing.pdf"),
            "drawing.pdf: cannot tell the format from the name; let it end with .txt or .csv or .json or .svg or .html",
        ),
        (("-o", "/missing/drawing.svg"), "/missing/drawing.svg: cannot be written"),
        (("--json", "--format", "csv"), "--json and --format both write to stdout"),
    ],
    ids=str,
)
def test_schedule_refuses_what_it_cannot_use(run: Run, more: tuple[str, ...], problem: str) -> None:
    assert problem in refused(run("schedule", "1f1b", "--devices", 4, "--microbatches", 8, *more))


def test_schedule_writes_csv_that_can_be_read_back(run: Run) -> None:
    ran = run("schedule", "zb-h1", "--devices", 3, "--microbatches", 4, "--format", "csv")
    programs = catalogue.build("zb-h1", ScheduleRequest(3, 4)).programs
    assert from_csv(ran.out, path="stdout") == programs
    torch = run("schedule", "zb-h1", "--devices", 3, "--microbatches", 4, "--format", "torch-csv")
    assert torch.out == to_torch_csv(programs)
    assert not any("U" in cell for row in csv.reader(torch.out.splitlines()) for cell in row)


@pytest.mark.parametrize("options", [("--branches", "1,2"), ("--branches", "1,1.5", "--coupled", "--split")])
def test_a_file_of_branches_is_shown_with_the_times_that_it_was_made_for(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    path, size = tmp_path / "branches.json", ("--devices", 2, "--microbatches", 4)
    assert run("schedule", "branch-aware", *size, *options, "-o", path).code == 0
    made = json.loads(run("schedule", "branch-aware", *size, *options, "--json").out)
    for command in (("show", path), ("schedule", path, "--devices", 2, "--microbatches", made["num_microbatches"])):
        found = json.loads(run(*command, "--json").out)
        assert {name: found[name] for name in made if name != "schedule"} == {name: made[name] for name in made if name != "schedule"}
    refused = run("schedule", path, *size, "--branches", "1,2")
    assert (refused.code, "--branches, --coupled and --split are for branch-aware" in refused.err) == (2, True)


def test_schedule_takes_the_format_from_the_name_of_the_file(run: Run, tmp_path: Path) -> None:
    command = ("schedule", "1f1b", "--devices", 2, "--microbatches", 3)
    for suffix in ("txt", "csv", "json", "svg", "html"):
        ran = run(*command, "-o", tmp_path / f"out.{suffix}")
        assert ran == Ran(0, "", "")
    assert (tmp_path / "out.txt").read_text().startswith("1f1b: 2 devices")
    assert load_schedule(tmp_path / "out.json").schedule == catalogue.build("1f1b", ScheduleRequest(2, 3))
    assert (tmp_path / "out.svg").read_text().startswith("<svg ")
    assert run(*command, "-o", tmp_path / "any.name", "--format", "csv").code == 0
    assert (tmp_path / "any.name").read_text() == (tmp_path / "out.csv").read_text()


def test_schedule_can_write_a_file_and_print_json(run: Run, tmp_path: Path) -> None:
    ran = run("schedule", "1f1b", "--devices", 2, "--microbatches", 3, "-o", tmp_path / "out.svg", "--json")
    assert ran.document.keys() >= SCHEDULE_KEYS
    assert (tmp_path / "out.svg").exists()


def test_schedule_draws_plain_text_where_there_is_no_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = run("schedule", "1f1b", "--devices", 4, "--microbatches", 8).out
    assert out.isascii()
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "0 |F0F1F2F3............B0- F4B1- F5B2- F6B3- F7B4- ..B5- ..B6- ..B7-" in out
    assert "makespan 33 s, bubble 27.3%" in out


# schedules


def test_schedules_lists_a_line_for_each(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    lines = run("schedules").out.splitlines()
    listed = run("schedules", "--json").document
    assert [row["name"] for row in listed] == [spec.name for spec in catalogue.SPECS]
    for row, line in zip(listed, lines[1 : len(listed) + 1], strict=True):
        assert row.keys() == {"name", "title", "paper", "bubble", "memory", "mismatch", "delay"}
        assert all(value in line for value in row.values())


# simulate


def test_simulate_prints_every_figure_of_the_contract(run: Run, files: dict[str, Path]) -> None:
    figures = run("simulate", files["plan"], "--json").document
    assert figures.keys() >= {"makespan_s", "update_s", "bubble_ratio", "busy_s", "device_bubble_ratios", "peak_memory_bytes"}
    # Two layers a stage, 4 microbatches, 3 updates.
    assert figures["busy_s"] == pytest.approx([3 * 4 * 2 * 0.03] * 2)
    assert 0 < figures["bubble_ratio"] < 1
    # Weights, three times as much for their state, and one activation of two layers at least.
    assert all(peak >= 4 * 4000 + 1000 for peak in figures["peak_memory_bytes"])


def test_simulate_shows_devices_and_writes_the_trace(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    ran = run("simulate", files["plan"], "-o", tmp_path / "again.json")
    assert "stage 1" in ran.out
    assert " of 1 MB" in ran.out
    assert Trace.load(tmp_path / "again.json") == Trace.load(files["trace"])
    assert run("simulate", files["plan"], "-o", tmp_path / "again.parquet").code == 0


def test_simulate_predicts_for_another_cluster(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    here = run("simulate", files["plan"], "--json").document
    ClusterTopology.uniform(8, latency_s=0.5, name="slow").save(tmp_path / "slow.yaml")
    there = run("simulate", files["plan"], "--topology", tmp_path / "slow.yaml", "--json").document
    assert there["topology"] == "slow"
    assert there["update_s"] > here["update_s"] + 1


def test_simulate_refuses_a_cluster_without_the_devices(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    ClusterTopology.uniform(1, name="single").save(tmp_path / "single.yaml")
    problem = refused(run("simulate", files["plan"], "--topology", tmp_path / "single.yaml"))
    assert "worker 1 is on device 'device1', which the topology 'single' does not have" in problem


def test_simulate_refuses_a_cluster_without_links(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    nodes = tuple(Node(name=f"n{index}", devices=(TopologyDevice(f"device{index}", "cpu"),)) for index in range(2))
    ClusterTopology(name="islands", nodes=nodes).save(tmp_path / "islands.yaml")
    assert "has no link between them" in refused(run("simulate", files["plan"], "--topology", tmp_path / "islands.yaml"))


@pytest.mark.parametrize("output", ["/missing/trace.json", "/missing/trace.parquet", "x" * 300 + ".json"])
def test_simulate_refuses_an_output_that_cannot_be_written(run: Run, files: dict[str, Path], output: str) -> None:
    assert f"{output}: cannot be written" in refused(run("simulate", files["plan"], "-o", output))


def test_times_that_do_not_add_up_to_a_number_are_refused(run: Run, tmp_path: Path) -> None:
    profile = ModelProfile.uniform(2, forward_s=1e308, backward_s=1e308)
    plan = make_plan(
        name="endless",
        planner="none",
        cut=balanced_cut(ModelProfile.uniform(2), 2),
        schedule=catalogue.build("gpipe", ScheduleRequest(2, 4)),
        profile=profile,
        topology=ClusterTopology.uniform(2),
        devices=("device0", "device1"),
        microbatch_size=1,
    )
    plan.save(tmp_path / "plan.json")
    for command in (("simulate",), ("simulate", "--json"), ("show",), ("show", "--json")):
        assert "its times add up to more than a number can hold" in refused(run(*command, tmp_path / "plan.json"))


# show


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("plan", "plan small, made by balanced: zb-h1"),
        ("profile", "layer3"),
        ("topology", "any other pair"),
        ("schedule", "zb-h1: 2 devices"),
        ("csv", "schedule: 2 devices"),
        ("trace", "simulated: small"),
    ],
)
def test_show_draws_each_kind_of_file(run: Run, files: dict[str, Path], kind: str, shown: str) -> None:
    ran = run("show", files[kind])
    assert ran.code == 0
    assert shown in ran.out
    assert isinstance(run("show", files[kind], "--json").document, dict)


@pytest.mark.parametrize("kind", ["plan", "topology", "schedule", "csv", "trace"])
def test_show_writes_svg(run: Run, files: dict[str, Path], tmp_path: Path, kind: str) -> None:
    assert run("show", files[kind], "-o", tmp_path / "out.svg") == Ran(0, "", "")
    assert (tmp_path / "out.svg").read_text().startswith("<svg ")


@pytest.mark.parametrize("kind", ["plan", "schedule", "csv", "trace"])
def test_show_writes_a_page(run: Run, files: dict[str, Path], tmp_path: Path, kind: str) -> None:
    assert run("show", files[kind], "-o", tmp_path / "out.html") == Ran(0, "", "")
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("kind", ["plan", "trace", "schedule"])
def test_show_tells_where_the_time_goes(run: Run, files: dict[str, Path], kind: str) -> None:
    out = run("show", files[kind]).out
    assert "of each device went" in out
    assert "waits for" in out
    assert "They trace back to" in out
    document = run("show", files[kind], "--json").document
    idle = document["idle"]
    for device in range(2):
        times = [row[device] for table in ("compute_s", "causes_s") for row in idle[table].values()]
        assert sum(times) == pytest.approx(document["makespan_s"])
    assert {(wait["device"], wait["for"]) for wait in idle["waits"]} == {(0, 1), (1, 0)}
    assert {"to", "device", "sender", "wait_s"} == set(idle["traced_back"][0])


def test_show_compares_two_traces(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    ClusterTopology.uniform(2, latency_s=0.5).save(tmp_path / "slow.yaml")
    run("simulate", files["plan"], "--topology", tmp_path / "slow.yaml", "-o", tmp_path / "slow.json")
    ran = run("show", files["trace"], tmp_path / "slow.json")
    assert "first: small" in ran.out
    assert "second: small" in ran.out
    for figure in ("update time", "stage 0: busy", "stage 1: waiting", "stage 1: bubble"):
        assert figure in ran.out
    document = run("show", files["trace"], tmp_path / "slow.json", "--json").document
    assert [figure["name"] for figure in document["differences"][3:5]] == ["device0: busy", "device0: waiting"]
    update = document["differences"][0]
    assert update["name"] == "update time"
    assert [update["first"], update["second"]] == [trace["update_s"] for trace in document["traces"]]
    assert update["error"] == pytest.approx(update["first"] / update["second"] - 1)
    for name in ("both.svg", "both.html"):
        assert run("show", files["trace"], tmp_path / "slow.json", "-o", tmp_path / name) == Ran(0, "", "")


def test_show_draws_two_traces_on_one_time_axis(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    trace = Trace.load(files["trace"])
    spans = tuple(span._replace(start_s=span.start_s * 2.3, end_s=span.end_s * 2.3) for span in trace.spans)
    replace(trace, spans=spans).save(tmp_path / "slow.json")
    lines = run("show", files["trace"], tmp_path / "slow.json").out.splitlines()
    rulers = [line for line in lines if line.split()[:1] == ["0"] and line.endswith("s")]
    assert len(rulers) > 1
    assert rulers[: len(rulers) // 2] == rulers[len(rulers) // 2 :]


def test_show_reads_the_csv_that_torch_writes(run: Run, tmp_path: Path) -> None:
    """Without updates, with empty cells for idle slots and slots that overlap."""
    (tmp_path / "torch.csv").write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1I1,1W1\n")
    figures = run("show", tmp_path / "torch.csv", "--json").document
    assert figures["schedule"] == "torch"
    assert (figures["num_stages"], figures["num_microbatches"], figures["num_updates"]) == (2, 2, 1)
    (tmp_path / "overlap.csv").write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert "F1&B0" in run("show", tmp_path / "overlap.csv").out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0,0B0\n2F0,2B0\n", "no worker has an Op of stage 1 of pipeline 0"),
        ("0B0,0F0\n", "worker 0, position 0: 0B0 runs before 0F0"),
        ("0F0,0B0,0F5,0B5\n", "microbatch 1 passes through 0 pipelines"),
        ("0F999999999,0B999999999\n", "microbatch 0 passes through 0 pipelines"),
        ("999999999F0\n", "no worker has an Op of stage 0"),
        ("0F0,0F1,0F2,0B0,0B1,0B2,0U0,0U1\n", "3 microbatches cannot be shared by 2 updates"),
        ("hello\n", "'hello' is no Op"),
        ("\n", "holds no Op"),
    ],
)
def test_show_refuses_a_csv_whose_order_cannot_run(run: Run, tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "order.csv").write_text(text)
    message = refused(run("show", tmp_path / "order.csv"))
    assert problem in message
    assert "order.csv" in message


def test_show_refuses_what_it_cannot_draw(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    assert "a topology has none; write an SVG file" in refused(run("show", files["topology"], "-o", tmp_path / "out.html"))
    assert "drawn to the terminal only" in refused(run("show", files["profile"], "-o", tmp_path / "out.html"))
    assert "let it end with .svg or .html" in refused(run("show", files["trace"], "-o", tmp_path / "out.png"))
    assert "3 files; show one, or two traces" in refused(run("show", *[files["trace"]] * 3))
    assert "where both are traces" in refused(run("show", files["trace"], files["plan"]))
    assert "drawn to the terminal only" in refused(run("show", files["profile"], "-o", tmp_path / "out.svg"))
    assert not list(tmp_path.glob("out.*"))
    (tmp_path / "other.json").write_text('{"format": "raypipe.plans/1"}')
    assert "did you mean 'raypipe.plan/1'" in refused(run("show", tmp_path / "other.json"))
    assert "there is no such file" in refused(run("show", tmp_path / "missing.json"))
    assert "no folder of a run" in refused(run("show", tmp_path))


def test_show_draws_topologies_with_every_kind_of_link(run: Run, tmp_path: Path) -> None:
    nodes = tuple(
        Node(name=f"n{index}", devices=tuple(TopologyDevice(f"d{index}.{slot}", "gpu") for slot in range(3)), link=NodeLink(latency_s=0.0))
        for index in range(3)
    )
    links = (
        Link(source="n0", target="n1", bandwidth_bytes_per_s=1e9, latency_s=1e-5),
        Link(source="n1", target="n2", bandwidth_bytes_per_s=2e9, latency_s=1e-5, one_way=True),
        Link(source="d0.0", target="d0.1", latency_s=1e-6),
    )
    shared = SharedLink(name="uplink", bandwidth_bytes_per_s=3e9, members=(("n0", "n1"), ("n1", "n0")))
    ClusterTopology(name="mixed", nodes=nodes, links=links, shared_links=(shared,)).save(tmp_path / "mixed.yaml")
    out = run("show", tmp_path / "mixed.yaml").out
    for words in ("n0 <-> n1", "n1 -> n2", "1 GB/s, 10 us", "uplink, shared by n0->n1 n1->n0", "d0.0 <-> d0.1", "no limit, 1 us"):
        assert words in out
    assert run("show", tmp_path / "mixed.yaml", "-o", tmp_path / "mixed.svg").code == 0
    drawn = (tmp_path / "mixed.svg").read_text()
    for words in ("2 GB/s", "uplink, shared by n0-&gt;n1", "d0.0 &lt;-&gt; d0.1: no limit", "d2.2"):
        assert words in drawn


# calibrate


def test_calibrate_prints_a_column_for_each_transport(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overheads = Overheads(forward_s=1e-3, send_s=2e-5)
    transports = {
        "shm": TransportCosts(overheads=overheads, link=NodeLink(latency_s=1e-5, bandwidth_bytes_per_s=3e9)),
        "gloo": TransportCosts(overheads=overheads, link=NodeLink(latency_s=1e-4)),
    }
    measured = Calibration(host="here", date="today", transports=transports)
    monkeypatch.setattr("raypipe.profiling.calibrator.calibrate", lambda *_, **__: measured)
    document = run("calibrate", "-o", tmp_path / "lab.json", "--json").document
    assert {name: document[name] for name in ("file", "host", "date")} == {
        "file": str(tmp_path / "lab.json"),
        "host": "here",
        "date": "today",
    }
    assert document["transports"]["gloo"]["bandwidth_bytes_per_s"] is None
    assert document["transports"]["shm"]["overheads"]["send_s"] == 2e-5
    lines = [" ".join(line.split()) for line in run("calibrate", "-o", tmp_path / "lab.json").out.splitlines()]
    assert lines[0] == "cost shm gloo"
    assert "sending a message 20 us 20 us" in lines
    assert "bandwidth of messages 3 GB/s -" in lines


# data prepare


def test_data_prepare_turns_text_into_tokens(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 1000)
    ran = run("data", "prepare", tmp_path / "text.txt", "-o", tmp_path / "tokens.parquet", "--json")
    prepared = ran.document
    assert prepared["num_train_tokens"] > 0
    assert prepared["file_bytes"] == (tmp_path / "tokens.parquet").stat().st_size
    ran = run("data", "prepare", tmp_path / "text.txt", "-o", tmp_path / "tokens.parquet", "--validation-fraction", 0)
    assert " 0 to validate with" in ran.out


def test_data_prepare_keeps_its_tokenizer(run: Run, tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    library.Tokenizer(library.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(path))
    (tmp_path / "text.txt").write_text("a a a")
    before = path.read_bytes()
    said = refused(run("data", "prepare", tmp_path / "text.txt", "--tokenizer", path, "-o", path))
    assert f"{path}: the output would replace {path}, which it is made from; choose another output" in said
    assert path.read_bytes() == before


def test_data_prepare_writes_named_fields(run: Run, tmp_path: Path) -> None:
    ran = run("data", "prepare", "easy-vqa", "-o", tmp_path / "vqa.parquet", "--validation-fraction", 0, "--json")
    assert ran.document["num_rows"] == {"train": 38575, "test": 9673}
    assert ran.document["file_bytes"] == (tmp_path / "vqa.parquet").stat().st_size


def test_data_prepare_says_which_package_is_missing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    assert "pip install 'raypipe[branches]'" in refused(run("data", "prepare", "easy-vqa", "-o", tmp_path / "vqa.parquet"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("missing.txt", "-o", "tokens.parquet"), "there is no text source 'missing.txt'"),
        (("python-stdlib",), "'--output'"),
        (("python-stdlib", "-o", "tokens.parquet", "--validation-fraction", "1"), "validation_fraction must be"),
        (("python-stdlib", "-o", "tokens.parquet", "--validation-fraction", "nan"), "validation_fraction must be"),
        (("glyphs", "-o", "glyphs.parquet", "--validation-fraction", "0.1"), "glyphs keeps a whole face for validation"),
        (("easy-vqa", "-o", "vqa.parquet", "--validation-fraction", "2"), "validation_fraction must be"),
        (("easy-vqa", "-o", "vqa.parquet", "--tokenizer", "t.json"), "easy-vqa has tokens of its own; leave --tokenizer out"),
        (("glyph", "-o", "glyphs.parquet"), "no text source 'glyph'; did you mean 'glyphs'"),
    ],
)
def test_data_prepare_refuses_what_it_cannot_use(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem in refused(run("data", "prepare", *arguments))
    assert list(tmp_path.iterdir()) == []


# Any bytes


def spoiled(content: bytes, chance: random.Random) -> bytes:
    """The bytes after a few edits, or other bytes altogether."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(200))
    edited = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 20))):
        at = chance.randrange(len(edited))
        match chance.randrange(4):
            case 0:
                edited[at] = chance.randrange(256)
            case 1:
                del edited[at : at + chance.randrange(1, 30)]
            case 2:
                start = chance.randrange(len(edited))
                edited[at:at] = edited[start : start + 40]
            case _:
                edited[at : at + 3] = chance.choice((b"1e308", b"-1", b"9223372036854775807", b"null", b"[]", b"{}", b'""', b"0"))
        if not edited:
            break
    return bytes(edited)


@pytest.mark.parametrize("kind", FILE_NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_spoiled_files_are_read_or_refused_with_one_message(run: Run, files: dict[str, Path], kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    content = files[kind].read_bytes()
    path = files[kind].with_stem("spoiled")
    svg, page = path.with_suffix(".svg"), path.with_suffix(".html")
    commands_to_try: list[tuple[object, ...]] = [
        ("show", path),
        ("show", path, "--json"),
        ("show", path, "-o", svg),
        ("show", path, "-o", page),
    ]
    commands_to_try += [("show", files["trace"], path)]
    commands_to_try += [("simulate", path, "--json")] if kind == "plan" else []
    commands_to_try += [("simulate", files["plan"], "--topology", path)] if kind == "topology" else []
    for _ in range(40):
        path.write_bytes(spoiled(content, chance))
        command = chance.choice(commands_to_try)
        ran = run(*command)
        if ran.code:
            refused(ran)
        elif "--json" in command:
            assert ran.document is not None


def test_a_coarse_chain_says_what_more_places_to_cut_give(run: Run, tmp_path: Path) -> None:
    def warnings(*options: str) -> list[str]:
        found: list[str] = run(
            "profile", "--from-pipedream", GNMT, "--microbatch-size", 64, "--chain", *options, "-o", tmp_path / "x.json", "--json"
        ).document["warnings"]
        return found

    (warning,) = warnings()
    assert "41.0% of the time" in warning
    assert "--max-crossing 2: 16 layers, 21.3%" in warning
    assert warnings("--max-crossing", "2") == []
