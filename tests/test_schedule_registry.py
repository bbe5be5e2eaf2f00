"""Schedules of one's own, by file, function and entry point: checked, simulated and refused like the bundled ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe import schedule_registry
from raypipe.artifacts.schedule import to_json
from raypipe.cli import main
from raypipe.config import ScheduleConfig
from raypipe.errors import ConfigError, FormatError, InputError, ScheduleError, UnknownNameError
from raypipe.model import Model
from raypipe.schedules import catalogue
from raypipe.schedules.ir import OpKind, Schedule, UpdateScope, WeightRule, ops_of
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.spec import ScheduleSpec
from raypipe.schedules.text import to_csv, to_torch_csv
from raypipe.schedules.validate import validate
from raypipe.training.run_schedules import schedule_request
from raypipe.user_code import make_model
from tests import strategies
from tests.schedules import handwritten

EXAMPLES = Path(__file__).parents[1] / "examples"
EAGER = f"{EXAMPLES}/own_schedule.py:eager"
EAGER_CSV = f"{EXAMPLES}/own_schedule.csv"
SPECS = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=spec.name)
        for spec in catalogue.SPECS
        if spec.weight_rule is WeightRule.FLUSH and spec.name != strategies.BRANCHED
    ],
)


def size_of(spec: ScheduleSpec, *, num_updates: int = 1) -> ScheduleRequest:
    return ScheduleRequest(4, 8, num_updates, num_chunks=spec.default_chunks)


def anonymous(schedule: Schedule) -> Schedule:
    return replace(schedule, name="")


def refusal(name: str, size: ScheduleRequest) -> str:
    with pytest.raises(InputError) as caught:
        schedule_registry.build(name, size)
    return str(caught.value)


# Names


def test_bundled_names_are_what_they_are() -> None:
    for spec in catalogue.SPECS:
        assert schedule_registry.spec(spec.name) is spec
    assert schedule_registry.build("1f1b", ScheduleRequest(2, 3)) == catalogue.build("1f1b", ScheduleRequest(2, 3))


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UnknownNameError, match=r"no schedule is called '1f1'; did you mean '1f1b'\?; choose from: gpipe, 1f1b"):
        schedule_registry.spec("1f1")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.csv", "none.csv: there is no such file"),
        ("none.json", "none.json: there is no such file"),
        ("none.py:f", "schedule 'none.py:f': there is no file 'none.py' in "),
        ("own.py", "schedule 'own.py': name the function in it, as in own.py:function"),
        ("no_such_module:f", "schedule 'no_such_module:f': no module 'no_such_module'"),
        (":f", "schedule ':f': expected module:function, such as my_orders:eager, or file.py:function"),
        ("raypipe.schedules.families.gpipe:gpip", "has no function 'gpip'; did you mean 'gpipe'?"),
        ("raypipe.schedules.spec:__doc__", "expected a function from a ScheduleRequest to a Schedule, or a ScheduleSpec, got str"),
    ],
)
def test_names_that_lead_nowhere_are_refused(name: str, problem: str) -> None:
    assert problem in refusal(name, ScheduleRequest(2, 2))


# Files


@SPECS
@pytest.mark.parametrize("num_updates", [1, 3])
@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_the_order_of_one_update_comes_back_from_a_file_for_any_window(
    tmp_path: Path, spec: ScheduleSpec, num_updates: int, suffix: str
) -> None:
    one = catalogue.of_size(spec, size_of(spec))
    path = written(one, tmp_path / f"order.{suffix}")
    read = schedule_registry.build(path, size_of(spec, num_updates=num_updates))
    assert anonymous(read) == anonymous(catalogue.of_size(spec, size_of(spec, num_updates=num_updates)))


def written(schedule: Schedule, path: Path) -> str:
    if path.suffix == ".json":
        path.write_text(to_json(schedule))
    else:
        assert schedule.weight_rule is WeightRule.FLUSH, "a CSV is synchronous"
        path.write_text(to_csv(schedule.programs))
    return str(path)


@SPECS
def test_a_file_has_the_figures_of_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: ScheduleSpec) -> None:
    def figures(name: str, *more: str) -> dict[str, Any]:
        assert main(["schedule", name, "--devices", "4", "--microbatches", "8", "--latency", "0.5", *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found | {"schedule": ""}

    def write(suffix: str) -> str:
        path = str(tmp_path / f"order.{suffix}")
        # With the same latency, which an order that is searched for depends on.
        assert main(["schedule", spec.name, "--devices", "4", "--microbatches", "8", "--latency", "0.5", "-o", path]) == 0
        return path

    bundled = figures(spec.name, "--json")
    assert figures(write("csv"), "--json") == bundled
    assert figures(write("json"), "--json") == bundled


@SPECS
def test_without_updates_as_torch_writes_it_each_worker_ends_with_its_own(tmp_path: Path, spec: ScheduleSpec) -> None:
    schedule = catalogue.of_size(spec, size_of(spec))
    programs = [[slot for slot in program if ops_of(slot)[0].kind is not OpKind.UPDATE] for program in schedule.programs]
    (tmp_path / "order.csv").write_text(to_csv(programs))
    assert anonymous(schedule_registry.build(str(tmp_path / "order.csv"), size_of(spec))) == anonymous(schedule)


def test_the_order_of_several_updates_is_taken_for_that_window_alone(tmp_path: Path) -> None:
    schedule = catalogue.build("zb-h1", ScheduleRequest(3, 4, 2))
    for suffix in ("csv", "json"):
        path = written(schedule, tmp_path / f"order.{suffix}")
        assert anonymous(schedule_registry.build(path, ScheduleRequest(3, 4, 2))) == anonymous(schedule)
        for num_updates in (1, 3):
            message = refusal(path, ScheduleRequest(3, 4, num_updates))
            assert f"is the order of 2 updates, asked for {num_updates}; use --updates 2 (schedule.updates_per_window)" in message


@pytest.mark.parametrize("name", strategies.ASYNCHRONOUS)
def test_an_asynchronous_order_keeps_its_rule_in_a_json_file_and_loses_it_in_a_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    size = strategies.near(name, 4, 8, 3)
    schedule = catalogue.build(name, size)
    arguments = ["schedule", name, "--devices", "4", "--microbatches", str(size.num_microbatches), "--updates", "3", "-o"]
    assert main([*arguments, str(tmp_path / "order.json")]) == 0
    assert not capsys.readouterr().err
    assert schedule_registry.build(str(tmp_path / "order.json"), size) == schedule
    assert main([*arguments, str(tmp_path / "order.csv")]) == 0
    assert f"read again, it is a synchronous schedule; a .json file keeps how {name} finds its weights" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_file_says_whether_its_updates_overlap(tmp_path: Path) -> None:
    for name, rule in (("async-1f1b", WeightRule.LIVE), ("pipedream-2bw", WeightRule.DOUBLE_BUFFER), ("1f1b", WeightRule.FLUSH)):
        path = written(catalogue.build(name, ScheduleRequest(2, 4)), tmp_path / "order.json")
        assert schedule_registry.spec(path).weight_rule is rule
        assert schedule_registry.overlaps(path) == schedule_registry.overlaps(name) == (rule is not WeightRule.FLUSH)


def test_a_json_file_keeps_graph_rule_and_scope(tmp_path: Path) -> None:
    schedule = replace(handwritten.two_branches(4), weight_rule=WeightRule.STASH, update_scope=UpdateScope.STAGE)
    (tmp_path / "branches.json").write_text(to_json(schedule))
    read = schedule_registry.build(str(tmp_path / "branches.json"), ScheduleRequest(3, 4, 2, num_chunks=2))
    assert (read.graph, read.weight_rule, read.update_scope) == (schedule.graph, WeightRule.STASH, UpdateScope.STAGE)
    other = schedule_registry.build(str(tmp_path / "branches.json"), ScheduleRequest(3, 4, num_chunks=2, update_scope=UpdateScope.GLOBAL))
    assert other == replace(schedule, update_scope=UpdateScope.GLOBAL)


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (ScheduleRequest(3, 8), "is an order for 4 devices and 8 microbatches an update, asked for 3 devices and 8 microbatches"),
        (ScheduleRequest(4, 9), "use --devices 4 --microbatches 8 (scaling.num_devices, schedule.num_microbatches)"),
        (ScheduleRequest(4, 8, num_chunks=2), "has 4 stages on 4 devices in 1 pipelines; leave --chunks and --pipelines"),
        (ScheduleRequest(4, 8, num_pipelines=2), "leave --chunks and --pipelines"),
        (ScheduleRequest(4, 8, 0), "num_updates must be at least 1"),
    ],
)
def test_a_file_is_refused_for_another_size_than_its_own(size: ScheduleRequest, problem: str) -> None:
    message = refusal(EAGER_CSV, size)
    assert problem in message
    if size.num_updates:
        assert message.startswith(EAGER_CSV)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlock: worker 0 waits with 0B0 for 1B0; worker 1 waits with 1F1 for 0F1"),
        ("0B0,0F0\n1F0,1B0\n", "worker 0, position 0: 0B0 runs before 0F0"),
        ("0F0,0B0\n2F0,2B0\n", "no worker has an Op of stage 1 of pipeline 0"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "worker 1 has no 1B1"),
        ("0F0,1F0,0B0\n1B0\n", "1B0 belongs on worker 0"),
        ("0F0,0B0,0U0\n1F0,1B0\n", "worker 1 has no 1U0"),
    ],
)
def test_an_order_that_cannot_run_is_refused_with_its_file_and_grid(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        schedule_registry.spec(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


def test_the_failing_op_is_marked_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "order.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n")
    assert main(["schedule", str(tmp_path / "order.csv"), "--devices", "2", "--microbatches", "2"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "order.csv: worker 1, position 1: 1B1 runs before 1F1" in output.err
    assert ">1B1<" in output.err


def test_what_is_no_order_is_refused(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text("stage,kind\n")
    with pytest.raises(FormatError, match=r"order\.csv: row 1, cell 1: 'stage' is no Op"):
        schedule_registry.spec(str(tmp_path / "order.csv"))
    (tmp_path / "plan.json").write_text('{"format": "raypipe.plan/1"}')
    with pytest.raises(FormatError, match=r"expected 'raypipe\.schedule/1', got 'raypipe\.plan/1'"):
        schedule_registry.spec(str(tmp_path / "plan.json"))


def test_blank_lines_at_the_end_are_no_workers(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text("0F0,,0B0\r\n,1F0,1B0\r\n\r\n\n")
    assert schedule_registry.build(str(tmp_path / "order.csv"), ScheduleRequest(2, 1)).num_workers == 2


# Functions


def test_the_example_is_valid_for_any_size_and_its_file_is_its_order() -> None:
    for num_devices in (1, 2, 3, 5):
        for num_microbatches in (1, 2, 7):
            validate(schedule_registry.build(EAGER, ScheduleRequest(num_devices, num_microbatches, 2)))
    eager = schedule_registry.build(EAGER, ScheduleRequest(4, 8))
    assert Path(EAGER_CSV).read_text() == to_torch_csv(eager.programs)
    assert anonymous(schedule_registry.build(EAGER_CSV, ScheduleRequest(4, 8, 3))) == anonymous(
        schedule_registry.build(EAGER, ScheduleRequest(4, 8, 3))
    )


def test_the_example_is_faster_than_1f1b_where_messages_are_slow(capsys: pytest.CaptureFixture[str]) -> None:
    def makespan_s(name: str) -> float:
        assert main(["schedule", name, "--devices", "4", "--microbatches", "8", "--latency", "0.5", "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["makespan_s"])

    assert (makespan_s(EAGER), makespan_s(EAGER_CSV), makespan_s("1f1b")) == (36.5, 36.5, 41.5)


def test_a_function_is_described_by_its_docstring_and_its_orders() -> None:
    spec = schedule_registry.spec(EAGER)
    assert spec.title == "Return 1F1B with twice the forwards before it alternates."
    assert [spec.peak_in_flight(ScheduleRequest(4, 8), worker) for worker in range(4)] == [7, 5, 3, 1]
    assert (spec.bubble, spec.memory, spec.delay) == ("?", "?", "?")


OWN = """
from dataclasses import replace
from raypipe.errors import ScheduleError
from raypipe.schedules.families.gpipe import SPEC, gpipe
from raypipe.schedules.families.interleaved import SPEC as INTERLEAVED

def lists(size):
    built = gpipe(size)
    return replace(built, programs=[list(program) for program in built.programs], pipelines=[[0, 1]], weight_rule="flush")

def raises(size):
    raise ValueError("too narrow")

def exits(size):
    raise SystemExit("enough")

def refuses(size):
    raise ScheduleError("use an odd number of devices")

def nothing(size):
    pass

def no_argument():
    pass

def texts(size):
    return replace(gpipe(size), programs=(("0F0",), ("1F0",)))

def not_iterable(size):
    return replace(gpipe(size), programs=None)

def no_graph(size):
    return replace(gpipe(size), graph=2)

def no_workers(size):
    return replace(gpipe(size), pipelines=(("first", "second"),))

def unknown_rule(size):
    return replace(gpipe(size), weight_rule="flash")

def larger(size):
    return gpipe(replace(size, num_devices=size.num_devices + 1))

def one_update(size):
    return gpipe(replace(size, num_updates=1))

def own_scope(size):
    return gpipe(replace(size, update_scope=None))

def wrong(size):
    built = gpipe(size)
    return replace(built, programs=(built.programs[0][::-1], built.programs[1]))
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "own.py").write_text(OWN)
    return lambda function: f"{tmp_path}/own.py:{function}"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises", "failed for 2 devices, 2 microbatches and 3 updates: ValueError: too narrow (own.py, line 12)"),
        ("exits", "failed for 2 devices, 2 microbatches and 3 updates: SystemExit: enough (own.py, line 15)"),
        ("refuses", "use an odd number of devices"),
        ("nothing", "returned NoneType, expected a raypipe.schedules.ir.Schedule"),
        ("no_argument", "TypeError: no_argument() takes 0 positional arguments but 1 was given"),
        ("texts", "worker 0, position 0: '0F0' is no Op; write Op(OpKind.FORWARD, stage, microbatch)"),
        ("not_iterable", "returned a schedule that cannot be read: 'NoneType' object is not iterable"),
        ("no_graph", "returned 2 as the stage graph; write StageGraph.chain(num_stages)"),
        ("no_workers", "returned ('first', 'second') as pipeline 0; write the number of the worker of each stage"),
        ("unknown_rule", "'flash' is not a valid WeightRule"),
        ("larger", "returned a schedule of 3 devices, asked for 2"),
        ("one_update", "returned a schedule of 1 updates, asked for 3"),
        ("own_scope", "returned a schedule of global as the scope of updates, asked for stage"),
        ("wrong", "own.py:wrong': worker 0, position 0: 0U2 runs before"),
    ],
)
def test_a_function_that_fails_is_named(own: Callable[[str], str], capsys: pytest.CaptureFixture[str], function: str, problem: str) -> None:
    command = ("schedule", own(function), "--devices", "2", "--microbatches", "2", "--updates", "3", "--update-scope", "stage")
    assert main(list(command)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert problem in output.err
    assert "Traceback" not in output.err
    if function != "refuses":
        assert f"schedule '{own(function)}'" in output.err


def test_a_file_that_ends_the_process_is_named(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys\n\ndef eager(size): ...\n\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"script.py failed: SystemExit: 3"):
        schedule_registry.spec(f"{path}:eager")


def test_a_model_that_ends_the_process_is_named() -> None:
    def model(code: int) -> Model:
        raise SystemExit(code)

    with pytest.raises(ConfigError, match=r"model\(code=3\) failed: SystemExit: 3"):
        make_model(model, {"code": 3})


def test_lists_and_texts_will_do_for_tuples_and_rules(own: Callable[[str], str], tmp_path: Path) -> None:
    built = schedule_registry.build(own("lists"), ScheduleRequest(2, 3, 2))
    assert built == catalogue.build("gpipe", ScheduleRequest(2, 3, 2))
    (tmp_path / "order.json").write_text(to_json(built))
    assert schedule_registry.build(str(tmp_path / "order.json"), ScheduleRequest(2, 3, 2)) == built


def test_a_family_keeps_what_it_says_of_itself(own: Callable[[str], str]) -> None:
    spec = schedule_registry.spec(own("INTERLEAVED"))
    assert (spec.name, spec.title, spec.default_chunks) == (own("INTERLEAVED"), "1F1B with V stages a device", 2)
    assert catalogue.of_size(spec, ScheduleRequest(2, 4, num_chunks=2)) == catalogue.build(
        "interleaved", ScheduleRequest(2, 4, num_chunks=2)
    )


# Entry points


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that installs a package with entry points; its module `my_orders` has the functions above."""

    def install(**entries: str) -> None:
        (tmp_path / "my_orders.py").write_text(OWN)
        (tmp_path / "my_script.py").write_text("raise SystemExit(3)")
        folder = tmp_path / "my_orders-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-orders\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[raypipe.schedules]", *lines, ""]))
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_a_registered_schedule_goes_by_its_name(
    installed: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    installed(lists="my_orders:lists", twice="my_orders:INTERLEAVED")
    assert schedule_registry.build("lists", ScheduleRequest(2, 3)) == catalogue.build("gpipe", ScheduleRequest(2, 3))
    assert schedule_registry.spec("twice").default_chunks == 2
    config = ScheduleConfig(name="twice", num_microbatches=4)
    assert schedule_request(config, num_devices=2, num_updates=1).num_chunks == 2
    assert main(["schedule", "twice", "--devices", "2", "--microbatches", "4"]) == 0
    assert main(["schedules"]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("lists", "twice"))]
    assert [line.split()[0] for line in listed] == ["lists", "twice"]
    assert "1F1B with V stages a device" in listed[1]
    with pytest.raises(UnknownNameError, match=r"did you mean 'twice'.*, lists, twice"):
        schedule_registry.spec("twise")


def test_bundled_names_cannot_be_taken(installed: Callable[..., None]) -> None:
    entries = {"1f1b": "my_orders:lists"}
    installed(**entries)
    assert schedule_registry.spec("1f1b") is schedule_registry.specs()[1]
    assert schedule_registry.specs()[-1].name == "my_orders:lists"
    assert schedule_registry.build("my_orders:lists", ScheduleRequest(2, 3)) == catalogue.build("gpipe", ScheduleRequest(2, 3))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("my_orders:missing", "AttributeError: module 'my_orders' has no attribute 'missing'"),
        ("no_such_orders:f", "ModuleNotFoundError: No module named 'no_such_orders'"),
        ("my_script:f", "SystemExit: 3"),
        ("my_orders:__name__", "expected a function from a ScheduleRequest to a Schedule, or a ScheduleSpec, got str"),
    ],
)
def test_a_broken_entry_point_is_named_and_hides_no_other(
    installed: Callable[..., None], capsys: pytest.CaptureFixture[str], value: str, problem: str
) -> None:
    installed(broken=value, lists="my_orders:lists")
    with pytest.raises(ConfigError) as caught:
        schedule_registry.spec("broken")
    assert f"schedule 'broken' (entry point {value} of my-orders)" in str(caught.value)
    assert problem in str(caught.value)
    assert [spec.name for spec in schedule_registry.specs()[-2:]] == ["broken", "lists"]
    assert main(["schedules", "--devices", "2", "--microbatches", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "lists" in {row["schedule"] for row in document["schedules"]}
    assert any(row["schedule"] == "broken" and problem in row["reason"] for row in document["refused"])


def test_a_file_without_backwards_is_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text("0F0,0F1\n1F0,1F1\n")
    assert schedule_registry.build(str(tmp_path / "order.csv"), ScheduleRequest(2, 2, 2)).forward_only
