"""`raypipe plan`: what it prints and writes, and what it says of bad input."""

from __future__ import annotations

import json
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.analysis.slack import stage_communication
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerTimes, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.show.tables import plan_report
from raypipe.simulation.simulator import simulate
from tests.cli.test_cli import Run, in_process, refused, run

__all__ = ["run"]

KEYS = {
    *("planner", "schedule", "num_stages", "stages", "num_devices", "idle_devices", "num_microbatches", "microbatch_size", "update_s"),
    *(
        "recomputed_stages",
        "lower_bound_s",
        "lower_bound_reason",
        "lower_bound_one_run_s",
        "lower_bound_bundled_s",
        "optimality_gap",
        "samples_per_s",
        "bubble_ratio",
        "peak_memory_bytes",
        "planning_s",
    ),
}
QUICK = ("--effort", 0.05)


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[object, ...]:
    """The arguments that name a small model and a cluster of two nodes with two devices each."""
    profile, topology = tmp_path / "profile.json", tmp_path / "topology.yaml"
    ModelProfile.uniform(
        8, forward_s=0.01, backward_s=0.02, output_bytes=1000, saved_bytes=500, parameter_bytes=2000, microbatch_size=4
    ).save(profile)
    ClusterTopology.uniform(4, latency_s=0.001, bandwidth_bytes_per_s=1e6, memory_bytes=10**6, devices_per_node=2).save(topology)
    return ("--profile", profile, "--topology", topology)


def test_the_plan_that_is_written_is_the_one_that_is_shown(run: Run, inputs: tuple[object, ...], tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    figures = run("plan", *inputs, "--microbatches", 8, *QUICK, "-o", written, "--json").document
    assert set(figures) == KEYS
    plan = Plan.load(written)
    assert plan_report(plan, stage_communication(plan, simulate(plan)), planning_s=figures["planning_s"]).document() == figures
    assert figures["lower_bound_s"] <= figures["update_s"]
    assert figures["optimality_gap"] == pytest.approx(figures["update_s"] / figures["lower_bound_s"] - 1)
    simulated = run("simulate", written, "--json").document
    assert simulated["update_s"] == pytest.approx(figures["update_s"])


def test_a_person_sees_stages_devices_memory_and_the_gap(run: Run, inputs: tuple[object, ...]) -> None:
    ran = run("plan", *inputs, "--microbatches", 8, *QUICK)
    assert ran.code == 0
    for word in ("stage", "layers", "devices", "(share of the rows)", "memory", "no plan takes less than", "gap", "samples/s"):
        assert word in ran.out


def test_an_update_that_takes_no_time_is_shown_without_a_rate(run: Run, tmp_path: Path) -> None:
    """Each layer takes none on one of two devices."""
    profile, topology = tmp_path / "profile.json", tmp_path / "topology.yaml"
    free, slow = (LayerTimes(forward_s=time_s, backward_s=time_s, weight_grad_s=0.0) for time_s in (0.0, 1.0))
    replace(ModelProfile.uniform(2), device_kinds={"one": (free, slow), "other": (slow, free)}).save(profile)
    node = Node(name="n", devices=(Device("d0", "one"), Device("d1", "other")), link=NodeLink(latency_s=0.0))
    ClusterTopology(name="t", nodes=(node,)).save(topology)
    ran = run("plan", "--profile", profile, "--topology", topology, "--microbatches", 4, *QUICK, "--compare")
    assert ran.code == 0
    assert "update 0 s, bubble 0.0%, no plan takes less than 0 s, planned in" in ran.out


def test_a_plan_explains_itself(run: Run, inputs: tuple[object, ...]) -> None:
    figures = run("plan", *inputs, "--microbatches", 8, *QUICK, "--explain", "--json").document
    best = [one["update_s"] for one in figures["tried"] if not one["missing_bytes"]]
    assert min(best) == pytest.approx(figures["update_s"])
    assert all(one["cost_s"] == pytest.approx(figures["update_s"] - one["update_s"]) for one in figures["without"])
    assert all(one["saved_s"] == pytest.approx(figures["update_s"] - one["update_s"]) for one in figures["helps"])
    assert figures["binds"] in {None, *(one["limit"] for one in figures["helps"])}
    assert all(one["lost_in"] for one in figures["tried"] if one["update_s"] > figures["update_s"] * (1 + 1e-9))
    assert figures["schedule_parameters"]["num_pipelines"] >= 1
    shown = run("plan", *inputs, "--microbatches", 8, *QUICK, "--explain").out
    for words in ("binds", "where the time of each device goes", "lost in", "so it costs", "microbatches in flight"):
        assert words in " ".join(shown.split())


@pytest.mark.parametrize(("optimizer", "is_measured"), [("torch.optim.Adagrad", False), ("nadamw", True)])
def test_a_plan_says_what_stands_for_an_optimizer_that_was_not_measured(
    run: Run, inputs: tuple[object, ...], optimizer: str, is_measured: bool
) -> None:
    shown = " ".join(run("plan", *inputs, "--microbatches", 8, *QUICK, "--optimizer", optimizer).out.split())
    assert (f"cost '{optimizer}' as many updates as nadamw" in shown) is not is_measured


def test_a_plan_says_both_halves_of_a_late_schedule_and_what_a_start_on_time_gives(
    run: Run, inputs: tuple[object, ...], tmp_path: Path
) -> None:
    """Two layers a device are all that the memory holds."""
    ModelProfile.uniform(8, forward_s=0.01, backward_s=0.02, output_bytes=1000, parameter_bytes=30000).save(tmp_path / "profile.json")
    late = ("plan", *inputs, "--microbatches", 8, *QUICK, "--schedule", "async-1f1b", "--optimizer", "nadamw")
    shown = " ".join(run(*late).out.split())
    assert "more updates to the same loss" in shown
    assert "with schedule.synchronous_updates at 20% of the run's updates" in shown
    started = " ".join(run(*late, "--synchronous-share", 0.2).out.split())
    assert "behind the first 20% of the updates" in started
    assert "schedule.synchronous_updates" not in started
    without, behind = (run(*late, "--synchronous-share", share, "--json").document["more_updates"] for share in (0, 0.2))
    assert 1 < behind < without


def test_all_planners_are_compared(run: Run, inputs: tuple[object, ...]) -> None:
    figures = run("plan", *inputs, "--microbatches", 8, *QUICK, "--compare", "--json").document
    assert set(figures["compared"]) == {
        "spp",
        "data-parallel",
        "ddp-overlap",
        "node-pipeline",
        "gpipe-equal",
        "1f1b-equal",
        "pipedream",
        "dapple",
        "metis",
    }
    assert all(other["update_s"] >= figures["update_s"] * (1 - 1e-9) for other in figures["compared"].values() if "update_s" in other)
    shown = run("plan", *inputs, "--microbatches", 8, *QUICK, "--compare").out
    assert "over this plan's" in shown


def test_one_device_gives_a_plan_of_one_stage(run: Run, inputs: tuple[object, ...], tmp_path: Path) -> None:
    alone = tmp_path / "alone.yaml"
    ClusterTopology.uniform(1).save(alone)
    figures = run("plan", *inputs[:2], "--topology", alone, "--microbatches", 4, "--json").document
    assert (figures["num_stages"], figures["num_devices"], figures["idle_devices"]) == (1, 1, [])


def test_where_memory_is_short_forwards_run_again_unless_that_is_forbidden(run: Run, inputs: tuple[object, ...], tmp_path: Path) -> None:
    tight, wide = tmp_path / "tight.yaml", tmp_path / "wide.json"
    ModelProfile.uniform(8, forward_s=0.01, backward_s=0.02, output_bytes=100, saved_bytes=5000, parameter_bytes=2000).save(wide)
    # Two layers' weights and state, and what they save for two of eight microbatches.
    ClusterTopology.uniform(4, memory_bytes=36_000, latency_s=0.001, bandwidth_bytes_per_s=1e6).save(tight)
    arguments = ("plan", "--profile", wide, "--topology", tight, "--microbatches", 8, "--schedule", "gpipe", *QUICK)
    figures = run(*arguments, "--json").document
    assert figures["recomputed_stages"]
    assert max(figures["peak_memory_bytes"]) <= 36_000
    assert "forwards run again in the backward pass" in run(*arguments).out
    assert "of memory on its fullest device" in refused(run(*arguments, "--no-recompute"))


def test_how_to_divide_a_batch_is_chosen_too(run: Run, inputs: tuple[object, ...]) -> None:
    figures = run("plan", *inputs, "--batch-size", 32, *QUICK, "--json").document
    assert figures["num_microbatches"] * figures["microbatch_size"] == 32
    assert figures["update_s"] <= run("plan", *inputs, "--microbatches", 8, *QUICK, "--json").document["update_s"]
    for arguments in ((), ("--batch-size", 32, "--microbatches", 4), ("--batch-size", 32, "--microbatch-size", 4)):
        assert "give either --microbatches" in refused(run("plan", *inputs, *arguments))


def test_layers_that_fit_nowhere_are_named(run: Run, inputs: tuple[object, ...], tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    ClusterTopology.uniform(4, memory_bytes=3000).save(small)
    message = refused(run("plan", *inputs[:2], "--topology", small, "--microbatches", 4))
    assert "layer 'layer0' needs" in message
    assert "too little" in message


def test_a_malformed_topology_is_refused_at_its_place(run: Run, inputs: tuple[object, ...], tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(Path(str(inputs[3])).read_text().replace("latency_s: 0.001", "latency_s: -1"))
    message = refused(run("plan", *inputs[:2], "--topology", broken, "--microbatches", 4))
    assert "broken.yaml" in message
    assert "latency_s" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--microbatches", 0), "microbatches"),
        (("--microbatches", 4, "--planner", "rapipe"), "did you mean 'raypipe'"),
        (("--microbatches", 4, "--schedule", "1f2b"), "did you mean '1f1b'"),
        (("--microbatches", 4, "--effort", 0), "effort"),
        (("--microbatches", 4, "--effort", "nan"), "'--effort': nan is not a finite number"),
        (("--microbatches", 4, "--max-mean-staleness", "nan"), "'--max-mean-staleness': nan is not a finite number"),
        (("--microbatches", 4, "--max-mean-staleness", "inf"), "'--max-mean-staleness': inf is not a finite number"),
    ],
)
def test_wrong_arguments_are_refused(run: Run, inputs: tuple[object, ...], arguments: tuple[object, ...], said: str) -> None:
    assert said in refused(run("plan", *inputs, *arguments))


def test_a_missing_profile_is_named(run: Run, inputs: tuple[object, ...]) -> None:
    assert "nowhere.json" in refused(run("plan", "--profile", "nowhere.json", *inputs[2:], "--microbatches", 4))


def test_outputs_are_looked_at_before_the_work(run: Run, inputs: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object, **__: object) -> None:
        pytest.fail("worked before it looked at the output")

    for module in ("plan.planning.plan", "schedule.figures_of", "simulate.simulator.simulate"):
        monkeypatch.setattr(f"raypipe.cli.{module}", work)
    commands = (
        ("plan", *inputs, "--microbatches", 4),
        ("rehearse", "none.json"),
        ("simulate", "none.json"),
        ("schedule", "1f1b", "--devices", 2, "--microbatches", 2, "--format", "csv"),
    )
    for command in commands:
        assert "/missing/out.json: cannot be written: its folder does not exist" in refused(run(*command, "-o", "/missing/out.json"))


@pytest.mark.parametrize(
    ("command", "suffixes"),
    [
        (("plan", "--profile", "none.json", "--topology", "none.yaml", "--microbatches", 4), ".json"),
        (("simulate", "none.json"), ".json or .parquet"),
        (("rehearse", "none.json"), ".json or .parquet"),
        (("profile", "none.yaml"), ".json"),
        (("probe",), ".yaml or .yml"),
        (("calibrate",), ".json"),
    ],
)
def test_an_output_with_the_ending_of_another_format_is_refused(
    run: Run, command: tuple[object, ...], suffixes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("raypipe.profiling.calibrator", "raypipe.cluster.prober"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))  # stands in for what measures
    output = tmp_path / "out.txt"
    assert f"out.txt: cannot tell the format from the name; let it end with {suffixes}" in refused(run(*command, "-o", output))


def test_calibrate_looks_at_its_output_before_it_measures(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for what loads ray and measures for most of a minute.
    stand_in = types.ModuleType("raypipe.profiling.calibrator")
    monkeypatch.setitem(sys.modules, "raypipe.profiling.calibrator", stand_in)
    (tmp_path / "file").touch()
    assert "its folder cannot be made" in refused(run("calibrate", "-o", tmp_path / "file" / "lab.json"))
    assert "it is a folder" in refused(run("calibrate", "-o", tmp_path))


def test_no_output_replaces_what_it_is_made_from(run: Run, inputs: tuple[object, ...], tmp_path: Path) -> None:
    made = tmp_path / "plan.json"
    assert run("plan", *inputs, "--microbatches", 4, *QUICK, "-o", made).code == 0
    (tmp_path / "other").symlink_to(tmp_path)  # the same file under another name
    profile, topology = (Path(str(inputs[at])) for at in (1, 3))
    order = tmp_path / "order.csv"
    assert run("schedule", "1f1b", "--devices", 2, "--microbatches", 2, "-o", order).code == 0
    commands = (
        (("plan", *inputs, "--microbatches", 4), profile),
        (("plan", *inputs, "--microbatches", 4), topology),
        (("simulate", made), made),
        (("simulate", made, "--topology", topology), topology),
        (("rehearse", made), made),
        (("schedule", order, "--devices", 2, "--microbatches", 2), order),
    )
    for command, source in commands:
        before = source.read_bytes()
        output = tmp_path / "other" / source.name
        assert f"{output}: the output would replace {source}, which it is made from" in refused(run(*command, "-o", output))
        assert source.read_bytes() == before


def test_names_with_brackets_are_printed_as_they_are(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes `[mlp]` for markup, and `[/red]` for markup that ends nothing."""
    monkeypatch.setenv("COLUMNS", "160")  # narrow terminals cut names
    profile, topology, made, trace = (tmp_path / name for name in ("profile.json", "topology.yaml", "plan.json", "trace.json"))
    uniform = ModelProfile.uniform(2, forward_s=0.01, backward_s=0.02)
    layers = tuple(replace(layer, name=f"blocks[mlp].{at}") for at, layer in enumerate(uniform.layers))
    replace(uniform, layers=layers).save(profile)
    device = Device("d0", "cpu[/red]")
    ClusterTopology(name="lab[/red]", nodes=(Node(name="n:cat:n", devices=(device,)),)).save(topology)
    planned = run("plan", "--profile", profile, "--topology", topology, "--microbatches", 4, *QUICK, "-o", made)
    replace(simulate(Plan.load(made)), devices=("rack[/red]gpu",)).save(trace)
    order = tmp_path / "order[red].csv"
    assert run("schedule", "1f1b", "--devices", 2, "--microbatches", 2, "-o", order).code == 0
    shown = [run("show", path).out for path in (profile, topology, made, trace, order)]
    for text, words in (
        (planned.out, ("blocks[mlp].1", "lab[/red]")),
        (shown[0], ("blocks[mlp].1",)),
        (shown[1], ("lab[/red]", "cpu[/red]", "n:cat:n")),
        (shown[2], ("blocks[mlp].1", "lab[/red]")),
        (shown[3], ("rack[/red]gpu |", "rack[/red]gpu   ")),
        (shown[4], ("order[red]",)),
    ):
        for word in words:
            assert word in text


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp", "gloo", "nccl"])
def test_a_rehearsal_takes_the_names_of_transports_as_configurations_have_them(run: Run, transport: str) -> None:
    assert "none.json: there is no such file" in refused(run("rehearse", "none.json", "--transport", transport))


def test_a_plan_can_be_read_by_others(run: Run, inputs: tuple[object, ...], tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    assert run("plan", *inputs, "--microbatches", 4, *QUICK, "-o", written).code == 0
    assert json.loads(written.read_text())["format"] == "raypipe.plan/1"
    assert run("show", written).code == 0


@pytest.fixture
def long_search(tmp_path: Path) -> tuple[str, ...]:
    """The arguments of a search that takes far longer than a test may."""
    profile, topology = tmp_path / "long.json", tmp_path / "long.yaml"
    ModelProfile.uniform(40, forward_s=0.01, backward_s=0.02, output_bytes=1000, parameter_bytes=2000, microbatch_size=4).save(profile)
    ClusterTopology.uniform(16, latency_s=0.001, bandwidth_bytes_per_s=1e6, devices_per_node=1).save(topology)
    return ("plan", "--profile", str(profile), "--topology", str(topology), "--microbatches", "16", "--effort", "100")


def test_a_time_limit_ends_with_the_best_plan_so_far(run: Run, long_search: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    began_s = time.monotonic()
    ran = run(*long_search, "--time-limit", 1, "-o", output)
    assert ran.code == 0
    assert time.monotonic() - began_s < 30
    assert Plan.load(output).predicted is not None


def test_a_time_limit_of_nothing_gives_the_first_plan(run: Run, inputs: tuple[object, ...]) -> None:
    ran = run("plan", *inputs, "--microbatches", 4, "--time-limit", 0, "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["update_s"] > 0


INTERRUPTED = (
    "import os, signal, sys\n"
    "from raypipe import stopping\n"
    "from raypipe.planning.evaluator import LayoutEvaluator\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # The shell of a test may have it ignored.
    "{patch}\n"
    "from raypipe.cli import main\n"
    "sys.exit(main())"
)


def test_ctrl_c_writes_the_best_plan_so_far_and_gives_130(long_search: tuple[str, ...], tmp_path: Path) -> None:
    patch = (
        "note = LayoutEvaluator.note\n"
        "def interrupted(self, evaluation):\n"
        "    LayoutEvaluator.note = note\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return note(self, evaluation)\n"
        "LayoutEvaluator.note = interrupted"
    )
    output = tmp_path / "plan.json"
    ran = in_process(*long_search, "-o", str(output), code=INTERRUPTED.format(patch=patch))
    assert ran.returncode == 130
    assert "best plan so far" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert Plan.load(output).predicted is not None


def test_ctrl_c_before_any_plan_says_so_and_gives_130(long_search: tuple[str, ...], tmp_path: Path) -> None:
    patch = (
        "simulate = LayoutEvaluator.simulate\n"
        "def interrupted(self, layout):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    stopping.spend()\n"
        "    return simulate(self, layout)\n"
        "LayoutEvaluator.simulate = interrupted"
    )
    output = tmp_path / "plan.json"
    ran = in_process(*long_search, "-o", str(output), code=INTERRUPTED.format(patch=patch))
    assert (ran.returncode, ran.stdout) == (130, "")
    assert "before any plan" in ran.stderr
    assert not output.exists()


def test_a_second_ctrl_c_ends_at_once(long_search: tuple[str, ...], tmp_path: Path) -> None:
    patch = "LayoutEvaluator.simulate = lambda self, layout: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"
    output = tmp_path / "plan.json"
    ran = in_process(*long_search, "-o", str(output), code=INTERRUPTED.format(patch=patch))
    assert ran.returncode == 130
    assert "Traceback" not in ran.stderr
    assert not output.exists()
