"""The order of events, and what becomes of a run whose callback fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raypipe.callbacks.base import Callback
from raypipe.callbacks.catalogue import BUNDLED, make_callback
from raypipe.callbacks.events import End, Evaluation, Run, Window
from raypipe.callbacks.group import CallbackGroup
from raypipe.callbacks.tables import COLUMNS
from raypipe.config import CallbackConfig, TrainConfig
from raypipe.errors import CallbackError, ConfigError, FormatError, RunError, StageFailedError, StageRaisedError
from tests.callbacks.events import run, window


class Heard(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_notice(self, text: str) -> None:
        self.events.append(text)

    def on_start(self, run: Run) -> None:
        self.events.append("start")

    def on_window(self, run: Run, window: Window) -> None:
        self.events.append(f"window {run.update}")

    def on_end(self, run: Run, end: End) -> None:
        self.events.append("end")

    def close(self) -> None:
        self.events.append("close")


class Fails(Callback):
    def __init__(self, hook: str, *, required: bool = False) -> None:
        self.required = required
        self.num_calls = 0
        setattr(self, hook, self._fail)

    def _fail(self, *_: object) -> None:
        self.num_calls += 1
        raise ValueError("no network")


def test_a_callback_that_fails_is_named_and_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    heard, fails = Heard(), Fails("on_window")
    group = CallbackGroup([fails, heard])
    group.start(run(tmp_path))
    group.window(window([1.0]))
    group.window(window([0.9], first_update=1))
    group.end(End(2))
    group.close()
    text = "callback Fails failed in on_window: ValueError: no network"
    assert heard.events == ["start", f"{text}; the run goes on without it", "window 1", "window 2", "end", "close"]
    assert fails.num_calls == 1
    assert [str(error) for error in group.dropped] == [text]
    assert not group.stop_reason


def test_one_that_fails_to_take_the_notice_of_another_failure_is_left_out_too(tmp_path: Path) -> None:
    both = Fails("on_notice")
    both.on_window = both._fail  # type: ignore[assignment]
    heard = Heard()
    group = CallbackGroup([Fails("on_window"), both, heard])
    group.start(run(tmp_path))
    group.window(window([1.0]))
    assert (both.num_calls, len(group.dropped)) == (1, 2)
    assert heard.events[-1] == "window 1"


DEVICE_LOST = StageFailedError("device 0", "0", "node", "predict", "it died", "")
STAGE_RAISED = StageRaisedError("device 0", "0", "node", "predict", "IndexError: index out of range", "")


class Uses(Callback):
    """Uses devices, which fail, in every event."""

    def __init__(self, error: RunError, *, required: bool = False) -> None:
        self.error, self.required = error, required
        self.num_calls = 0

    def on_window(self, run: Run, window: Window) -> None:
        self.num_calls += 1
        raise self.error

    def on_end(self, run: Run, end: End) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "required", "calls"),
    [(STAGE_RAISED, False, 1), (STAGE_RAISED, True, 2), (DEVICE_LOST, False, 2)],
    ids=["raised", "needed", "lost"],
)
def test_a_callback_on_whose_rows_a_stage_raises_is_left_out_and_the_run_recovers(
    tmp_path: Path, error: RunError, required: bool, calls: int
) -> None:
    uses = Uses(error, required=required)
    group = CallbackGroup([uses, Heard()])
    group.start(run(tmp_path))
    with pytest.raises(type(error)):
        group.window(window([1.0]))
    for _ in range(calls - 1):
        with pytest.raises(type(error)):
            group.window(window([1.0]))
    if calls == 1:
        group.window(window([1.0]))
    assert uses.num_calls == calls
    assert [one.callback for one in group.dropped] == ["Uses"] * (calls == 1)


def test_a_device_that_fails_at_the_end_keeps_no_callback_from_being_told(tmp_path: Path) -> None:
    heard = Heard()
    group = CallbackGroup([Uses(DEVICE_LOST), heard])
    group.start(run(tmp_path))
    group.end(End(2, RunError("the real error")))
    assert "end" in heard.events
    assert [(one.callback, one.hook) for one in group.dropped] == [("Uses", "on_end")]


def test_only_callbacks_that_have_started_are_told_the_end(tmp_path: Path) -> None:
    before, behind = Heard(), Heard()
    group = CallbackGroup([before, Fails("on_start"), behind])
    with pytest.raises(CallbackError, match="on_start"):
        group.start(run(tmp_path))
    group.end(End(0, ValueError()))
    group.close()
    assert (before.events, behind.events) == (["start", "end", "close"], ["close"])


def test_a_required_callback_that_fails_asks_the_run_to_end(tmp_path: Path) -> None:
    group = CallbackGroup([Fails("on_evaluation", required=True)])
    group.start(run(tmp_path))
    group.evaluation(Evaluation(2, 1.0))
    assert group.error is not None
    assert (group.error.callback, group.error.hook) == ("Fails", "on_evaluation")
    assert isinstance(group.error.__cause__, ValueError)
    assert group.stop_reason == str(group.error)


def test_a_failure_at_the_start_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="on_start"):
        CallbackGroup([Fails("on_start")]).start(run(tmp_path))


def test_a_run_that_never_started_is_closed_but_does_not_end() -> None:
    heard = Heard()
    group = CallbackGroup([heard])
    group.notice("loading")
    group.end(End(0, ValueError()))
    group.close()
    assert heard.events == ["loading", "close"]


def test_the_first_reason_to_stop_counts(tmp_path: Path) -> None:
    group = CallbackGroup([])
    group.start(started := run(tmp_path))
    started.stop("one")
    started.stop("two")
    assert group.stop_reason == "one"


def test_figures_of_the_run_are_logged_by_nobody_else(tmp_path: Path) -> None:
    started, written = run(tmp_path), list[dict[str, Any]]()
    started.write_metrics = written.append
    for name in [*window([1.0]).figures(), *COLUMNS]:
        with pytest.raises(ConfigError, match=re.escape(f"run.log: {name!r} is a figure of the run")):
            started.log(name, 1.0)
    started.log("my_loss", 1.0)
    assert (started.logged, written) == ({"my_loss": 1.0}, [{"update": 0, "my_loss": 1.0}])


CONFIG = "format: raypipe.train/1\nmodel: {function: 'a:b'}\ndata: {path: tokens.parquet}\n"


def test_configurations_name_callbacks_alone_or_with_options() -> None:
    text = CONFIG + "callbacks: [csv, {name: early-stopping, options: {patience: 2}}]\n"
    config = TrainConfig.from_text(text, path="config.yaml")
    assert config.callbacks == (CallbackConfig(name="csv"), CallbackConfig(name="early-stopping", options={"patience": 2}))
    assert [type(make_callback(one)).__name__ for one in config.callbacks] == ["Csv", "EarlyStopping"]
    with pytest.raises(FormatError, match=r"callbacks\[0\]"):
        TrainConfig.from_text(CONFIG + "callbacks: [{nam: csv}]\n", path="config.yaml")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("tensorbord", "no callback is called 'tensorbord'; did you mean 'tensorboard'"),
        ("pathlib:Path", "expected a class that extends raypipe.Callback"),
        ("no_such_module_here:Mine", "no module 'no_such_module_here'"),
        (CallbackConfig(name="csv", options={"file": "x"}), "unexpected keyword argument 'file'"),
        (CallbackConfig(name="early-stopping", options={"by": "accuracy"}), "choose from loss, validation_loss"),
    ],
)
def test_what_is_no_callback_is_refused(given: str | CallbackConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_callback(given)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"needs the package {name}: pip install 'raypipe\[{name}\]'"):
        make_callback(name)


def test_the_class_and_the_bundled_callbacks_load_neither_torch_nor_ray_nor_their_packages() -> None:
    modules = ", ".join(sorted({place.partition(":")[0] for place in BUNDLED.values()}))
    code = (
        f"import sys, raypipe, {modules}; raypipe.Callback; "
        "print(sorted({'torch', 'ray', 'tensorboard', 'wandb', 'mlflow', 'pyarrow.parquet'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
