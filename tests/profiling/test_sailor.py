"""Sailor's profiles and bandwidths are read as they are meant, and what is none is refused by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cli import main
from raypipe.errors import FormatError, InputError, UnknownNameError
from raypipe.profiling.sailor import LEAST_BYTES, MOST_BYTES, GpuNode, LinkCurve, SailorData, parse_nodes

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "measured_clusters"

SIZES = {"params_floats": 100, "act_output_floats": 10, "act_input_floats": 10, "act_mem_floats": 70}
FLAT = [[0.0, 0.0, 2.0], 2e9]  # 2 GB/s at any size
SLOW = [[0.0, 0.0, 0.5], 0.5e9]


def files() -> dict[str, Any]:
    """Return a model of two layers on two kinds of GPU, and nodes of four and of two GPUs."""
    fast, slow = {"0": [1.0, 2.0, 0.25], "1": [3.0, 4.0, 0.5]}, {"0": [2.0, 3.0, 0.5], "1": [9.0, 8.0, 1.0]}
    return {
        "profiles": {"m": {"fast": {"4": {"2": fast}, "8": {"2": fast}}, "slow": {"4": {"2": slow, "1": slow}}}},
        "layers": {"m": {"2": {"0": SIZES, "1": SIZES | {"params_floats": 0}}}},
        "training": {"models": {"m": {"layers": 2}}, "nodes": {gpu: {"gpus_per_node": 4, "mem_per_gpu": 1000} for gpu in ("fast", "slow")}},
        "within_node": {"fast": {"2": [[0.0, 0.0, 10.0], 10e9], "4": [[0.0, 0.0, 20.0], 20e9]}},
        "between_nodes": {
            "z": {
                "fast": {
                    "1": {"z": {"fast": {"1": SLOW}}},
                    "2": {"z": {"fast": {"2": FLAT}, "slow": {"2": FLAT}}},
                    "4": {"z": {"fast": {"4": [[0.0, 0.0, 3.0], 3e9]}, "slow": {"4": SLOW}}},
                }
            }
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, tree in files().items():
        (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    return tmp_path


def changed(folder: Path, name: str, tree: object) -> SailorData:
    (folder / f"{name}.json").write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return SailorData(folder)


def test_a_group_of_gpus_is_one_device_with_the_memory_of_all(folder: Path) -> None:
    profile = SailorData(folder).profile("m", microbatch_size=4, tensor_parallel=2)
    first, second = profile.layers
    assert (profile.name, profile.microbatch_size) == ("m", 4)
    assert (first.forward_s, first.backward_s, first.weight_grad_s, first.update_s) == (1.0, 2.0, 1.0, 0.25)
    assert second.weight_grad_s == 0  # without weights
    # Four bytes a number: weights of two GPUs, an output of four rows, and what two GPUs keep of four rows.
    assert (first.parameter_bytes, first.output_bytes, first.saved_bytes) == (2 * 400, 4 * 40, 2 * 4 * 280)


def test_each_kind_of_gpu_has_its_own_times(folder: Path) -> None:
    profile = SailorData(folder).profile("m", microbatch_size=4, tensor_parallel=2, gpu="slow", weight_grad_share=0.25)
    assert [layer.forward_s for layer in profile.layers] == [2.0, 9.0]
    assert {kind: [times.backward_s for times in layers] for kind, layers in profile.device_kinds.items()} == {
        "fast": [2.0, 4.0],
        "slow": [3.0, 8.0],
    }
    assert profile.device_kinds["slow"][0].weight_grad_s == 0.75


def test_kinds_that_were_not_measured_at_this_size_are_left_out(folder: Path) -> None:
    assert list(SailorData(folder).profile("m", microbatch_size=8, tensor_parallel=2).device_kinds) == ["fast"]


def test_nodes_are_listed_by_gpu_number_and_zone() -> None:
    assert parse_nodes("A100-40x4@us-central1-a*2, RTX-3090x8@b") == [GpuNode("A100-40", 4, "us-central1-a")] * 2 + [
        GpuNode("RTX-3090", 8, "b")
    ]
    for text in ("", "A100-40", "A100-40x0@z", "x4@z", "gx4@z*0"):
        with pytest.raises(InputError):
            parse_nodes(text)


def test_links_have_what_as_many_gpus_reach_and_nodes_what_all_reach(folder: Path) -> None:
    topology = SailorData(folder).topology(parse_nodes("fastx4@z*2"), tensor_parallel=2)
    assert [(device.name, device.kind, device.memory_bytes) for device in topology.nodes[0].devices] == [
        ("node0/0", "fast", 2000),
        ("node0/1", "fast", 2000),
    ]
    assert topology.path("node0/0", "node0/1").bandwidth_bytes_per_s == pytest.approx(20e9)
    across = topology.path("node0/0", "node1/1")
    assert across.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert {round(bandwidth / 1e9, 6) for _, bandwidth in across.resources} == {2.0, 3.0}


def test_more_gpus_reach_at_least_what_fewer_reach(folder: Path) -> None:
    data = SailorData(folder)
    fast, slow = parse_nodes("fastx4@z,slowx4@z")
    assert data.between(fast, slow, 4).line[1] == pytest.approx(2e9)  # with two GPUs each, though 0.5e9 with four
    assert data.between(slow, fast, 2).line[1] == pytest.approx(2e9)  # measured the other way only


def test_a_share_of_the_rates_scales_every_link(folder: Path) -> None:
    topology = SailorData(folder).topology(parse_nodes("fastx2@z*3"), tensor_parallel=2, rate_share=0.25)
    assert topology.path("node0/0", "node2/0").bandwidth_bytes_per_s == pytest.approx(0.5e9)
    with pytest.raises(InputError):
        SailorData(folder).topology(parse_nodes("fastx2@z*3"), rate_share=0.0)


def test_a_latency_and_a_rate_stand_for_the_bandwidths_of_the_measured_runs() -> None:
    data = SailorData(FOLDER)
    pairs = [("GH-96", "GH-96", 4), ("RTX-3090", "Titan-RTX", 2), ("RTX-3090", "RTX-2080", 8), ("RTX-2080", "Titan-RTX", 8)]
    for one, other, count in pairs:
        curve = data.between(GpuNode(one, count, "us-central1-a"), GpuNode(other, count, "us-central1-a"), count)
        assert curve.error < 0.03
        latency_s, rate = curve.line
        for size in (LEAST_BYTES, MOST_BYTES):
            assert latency_s + size / rate == pytest.approx(curve.seconds(size), rel=0.03)


def test_rates_of_the_curve_stay_within_those_measured() -> None:
    curve = LinkCurve((-1.0, 4.0, 8.0), 10e9)
    assert curve.seconds(1e6) == pytest.approx(1 / 8e3)
    assert curve.seconds(4e6) == pytest.approx(4e6 / 10e9)  # x = 2 would be 12 GB/s
    assert curve.seconds(0.5e6) == pytest.approx(0.5e6 / 8e9)
    with pytest.raises(InputError):
        LinkCurve((1.0, 1.0, 0.0), 10e9)
    assert curve.seconds(2.0**12 * 1e6) == pytest.approx(2.0**12 * 1e6 / 8e9)  # the parabola falls again


@pytest.mark.parametrize(
    ("name", "tree", "where"),
    [
        ("profiles", "{", ""),
        ("profiles", {"m": {"fast": {"four": {}}}}, "m.fast.four"),
        ("profiles", {"m": {"fast": {"4": {"2": {"0": [1.0, -2.0, 0.1]}}}}}, "m.fast.4.2.0[1]"),
        ("profiles", {"m": {"a": {"4": {"2": {"0": [1, 1, 1], "1": [1, 1, 1]}}}, "b": {"4": {"2": {"0": [1, 1, 1]}}}}}, None),
        ("layers", {"m": {"2": {"0": SIZES}}}, "m.2"),
        ("layers", {"m": {"2": {"0": SIZES, "1": {"params_floats": 1}}}}, "m.2.1"),
    ],
)
def test_a_broken_file_is_refused_by_its_place(folder: Path, name: str, tree: object, where: str | None) -> None:
    with pytest.raises(FormatError) as refused:
        changed(folder, name, tree).profile("m", microbatch_size=4, tensor_parallel=2)
    # Numbers of layers that differ are said of the file with their sizes.
    assert refused.value.path == str(folder / ("layers.json" if where is None else f"{name}.json"))
    assert refused.value.where.startswith("m.2" if where is None else where)


def test_what_was_not_measured_is_refused(folder: Path) -> None:
    data = SailorData(folder)
    for model, rows, degree, gpu in (("x", 4, 2, None), ("m", 4, 1, None), ("m", 4, 2, "other")):
        with pytest.raises(UnknownNameError):
            data.profile(model, microbatch_size=rows, tensor_parallel=degree, gpu=gpu)
    with pytest.raises(InputError, match="4 rows on 2 GPUs"):
        data.profile("m", microbatch_size=5, tensor_parallel=2)
    with pytest.raises(InputError):
        data.profile("m", microbatch_size=4, tensor_parallel=2, weight_grad_share=2.0)
    for nodes, degree in (("fastx4@z*2", 3), ("fastx4@y*2", 2), ("slowx4@z*2", 2)):
        with pytest.raises(InputError):
            data.topology(parse_nodes(nodes), tensor_parallel=degree)
    with pytest.raises(UnknownNameError):
        data.topology(parse_nodes("otherx4@z"), tensor_parallel=2)


def test_the_command_line_converts_profile_and_links(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, topology = folder / "out.json", folder / "out.yaml"
    source = ["--from-sailor", str(folder), "--tensor-parallel", "2"]
    assert main(["profile", *source, "--model", "m", "--microbatch-size", "4", "--gpu", "slow", "-o", str(profile)]) == 0
    assert ModelProfile.load(profile) == SailorData(folder).profile("m", microbatch_size=4, tensor_parallel=2, gpu="slow")
    assert main(["probe", *source, "--nodes", "fastx4@z*2", "-o", str(topology)]) == 0
    assert ClusterTopology.load(topology) == SailorData(folder).topology(parse_nodes("fastx4@z*2"), tensor_parallel=2)
    capsys.readouterr()
    assert main(["probe", *source, "--nodes", "fastx4@z*2", "--json"]) == 0
    (link,) = json.loads(capsys.readouterr().out)["links"]
    assert (link["from"], link["to"], link["bandwidth_bytes_per_s"]) == ("fast z", "fast z", pytest.approx(2e9))


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "--from-sailor", "x", "--microbatch-size", "4", "-o", "out.json"],
        ["profile", "--from-sailor", "x", "--model", "m", "-o", "out.json"],
        ["profile", "--from-sailor", "x", "--from-pipedream", "y", "--model", "m", "--microbatch-size", "4", "-o", "out.json"],
        ["profile", "--from-pipedream", "y", "--model", "m", "--microbatch-size", "4", "-o", "out.json"],
        ["profile", "--from-sailor", "x", "--model", "m", "--microbatch-size", "4", "--repeats", "3", "-o", "out.json"],
        ["probe", "--from-sailor", "x"],
        ["probe", "--nodes", "gx4@z"],
        ["probe", "--from-sailor", "x", "--nodes", "gx4@z", "--use-gpu"],
    ],
)
def test_options_that_do_not_fit_together_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().out == ""
