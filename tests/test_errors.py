"""The error tree is the one that is drawn, and every error crosses a process border whole."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from raypipe import errors
from raypipe.errors import (
    AbortedError,
    CallbackError,
    ConfigError,
    FormatError,
    InputError,
    NoLinkError,
    NonFiniteError,
    NoPlanYetError,
    PlanError,
    RaypipeError,
    RunError,
    RunTakenOverError,
    ScheduleError,
    StageFailedError,
    StageRaisedError,
    StateLostError,
    TransportError,
    TransportTimeoutError,
    UnknownNameError,
    suggestion,
)

# One of each class, with attributes that differ from each other and from any default.
EXAMPLES: tuple[RaypipeError, ...] = (
    RaypipeError("something failed"),
    InputError("--devices is 0; give 1 or more"),
    ConfigError("num_microbatches is 0; give 1 or more"),
    FormatError("profile.json", "layers[3].forward_s", "expected seconds, got 'fast'; measure again with: raypipe profile"),
    ScheduleError("device 3, position 5: 3B0 runs before 3F0", "3F0 3F1 >3B0<"),
    UnknownNameError("schedule", "gpip", ["gpipe", "1f1b"]),
    PlanError("plan needs 8 devices but the topology has 6 (cluster_configs/lab.yaml); lower num_stages or add devices"),
    NoLinkError("no link from device 'a/0' to device 'c/0'; add one, or a route (`via`)"),
    NoPlanYetError("planning was stopped before it found a plan that fits; allow it more time"),
    RunError("the cluster did not start"),
    TransportError("a:gpu0", "b:gpu1", "receive of 2F5", "the connection was closed"),
    TransportTimeoutError("a:gpu0", "b:gpu1", "receive of 2F5", "no answer in 30 s"),
    StageFailedError("b:gpu1", "2-3", "b", "window 3, 2B5", "out of memory", "lower microbatch_size"),
    StageRaisedError("b:gpu1", "2-3", "b", "window 3, 2B5", "ValueError: no", "see the log"),
    StateLostError("taking layers over: no copy is left"),
    NonFiniteError("weight in layer-0000-a.safetensors is infinite or no number"),
    RunTakenOverError("runs/gpt: process 7 on host node-7 has taken over this run"),
    CallbackError("MyCallback", "on_window", "ValueError: no"),
    AbortedError("stopped because device b:gpu1 failed"),
)
BY_CLASS = [pytest.param(error, id=type(error).__name__) for error in EXAMPLES]


def defined_classes() -> set[type[object]]:
    return {value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__}


def drawn_bases(drawing: str) -> dict[str, tuple[str, ...]]:
    """Reads the tree in a docstring: the names of the bases, in order, by the name of the class."""
    bases: dict[str, tuple[str, ...]] = {}
    path: list[str] = []
    for line in drawing.splitlines():
        match = re.match(r" {4}(?P<branch>(?:[|` ] {3})*(?:[|`]-- )?)(?P<name>\w+Error)(?: \((?P<other>\w+)\))?", line)
        if match is None:
            continue
        depth = len(match["branch"]) // 4
        parent = path[depth - 1] if depth else "Exception"
        path[depth:] = [match["name"]]
        bases[match["name"]] = (parent, match["other"]) if match["other"] else (parent,)
    return bases


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    actual = {cls.__name__: tuple(base.__name__ for base in cls.__bases__) for cls in defined_classes()}
    assert drawn_bases(errors.__doc__ or "") == actual


def test_every_error_class_has_an_example_here() -> None:
    missing = defined_classes() - {type(error) for error in EXAMPLES}
    assert not missing, f"add an instance of {', '.join(sorted(cls.__name__ for cls in missing))} to EXAMPLES"


@pytest.mark.parametrize("error", BY_CLASS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_class_text_and_attributes(error: RaypipeError, protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", BY_CLASS)
def test_the_text_holds_every_attribute(error: RaypipeError) -> None:
    for value in vars(error).values():
        for part in value if isinstance(value, tuple) else (value,):
            assert part in str(error)


@pytest.mark.parametrize("error", BY_CLASS)
def test_an_error_is_either_of_the_input_or_of_the_run(error: RaypipeError) -> None:
    if type(error) is not RaypipeError:
        assert isinstance(error, ValueError) == isinstance(error, InputError)
        assert isinstance(error, RuntimeError) == isinstance(error, RunError)
        assert isinstance(error, InputError) != isinstance(error, RunError)


def test_a_format_error_names_file_place_and_problem_in_this_order() -> None:
    assert str(FormatError("plan.json", "stages[1]", "expected a list")) == "plan.json: stages[1]: expected a list"


def test_a_format_error_about_a_whole_file_has_no_empty_place() -> None:
    assert str(FormatError("plan.json", "", "is not JSON")) == "plan.json: is not JSON"


def test_a_schedule_error_shows_the_grid_below_the_problem() -> None:
    assert str(ScheduleError("3B0 runs before 3F0", "3F0\n3B0")) == "3B0 runs before 3F0\n3F0\n3B0"


def test_a_schedule_error_without_a_grid_is_one_line() -> None:
    assert str(ScheduleError("3B0 runs before 3F0")) == "3B0 runs before 3F0"


def test_an_unknown_name_is_answered_with_the_nearest_and_all_choices() -> None:
    text = str(UnknownNameError("schedule", "gpip", ["gpipe", "1f1b"]))
    assert text == "no schedule is called 'gpip'; did you mean 'gpipe'?; choose from: gpipe, 1f1b"


def test_a_name_far_from_all_choices_gets_no_suggestion() -> None:
    assert not suggestion("xyz", ["gpipe", "1f1b"])


def test_choices_given_as_an_iterator_are_kept() -> None:
    assert UnknownNameError("schedule", "gpip", iter(["gpipe", "1f1b"])).choices == ("gpipe", "1f1b")


def test_a_failed_stage_is_told_with_device_node_moment_and_remedy() -> None:
    error = StageFailedError("b:gpu1", "2-3", "b", "window 3, 2B5", "out of memory", "lower microbatch_size")
    assert str(error) == "stage 2-3 (device b:gpu1, node b) failed during window 3, 2B5: out of memory; lower microbatch_size"
