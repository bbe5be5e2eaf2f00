"""PipeDream's profiles are read as they are meant, and what is none is refused by its line."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.cli import main
from raypipe.errors import FormatError, InputError
from raypipe.profiling.pipedream import read_pipedream

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "pipedream_profiles"
MODELS = {"vgg16": 40, "resnet50": 176, "gnmt": 45, "inception_v3": 325}

NODES = """\
node1 -- Input -- forward_compute_time=9.000, backward_compute_time=0.000, activation_size=4000.0, parameter_size=0.000
node2 -- Linear(in_features=10, out_features=20, bias=True) -- {times}, activation_size=8000.0, parameter_size=880.000
node3 -- ReLU(inplace) -- {times}, activation_size=8000.0, parameter_size=0.000
node4 -- LSTM(20, 5) -- {times}, activation_size=[2000.0; 300.0; 40.0], parameter_size=2000.000
node5 -- __getitem__(0) -- {times}, activation_size=2000.0, parameter_size=0.000
node6 -- __getitem__(1) -- {times}, activation_size=300.0, parameter_size=0.000
node7 -- Add -- {times}, activation_size=2000.0, parameter_size=0.000
node8 -- Linear(5, 1) -- {times}, activation_size=500.0, parameter_size=24.000
""".format(times="forward_compute_time=2.000, backward_compute_time=3.000")
EDGES = "".join(f"\tnode{a} -- node{b}\n" for a, b in ((1, 2), (2, 3), (3, 4), (4, 5), (4, 6), (3, 7), (5, 7), (7, 8)))


def read(tmp_path: Path, text: str, *, microbatch_size: int = 100, weight_grad_share: float = 0.5) -> ModelProfile:
    path = tmp_path / "small.graph.txt"
    path.write_text(text)
    return read_pipedream(path, microbatch_size=microbatch_size, weight_grad_share=weight_grad_share)


def test_operators_become_layers_and_edges_are_kept(tmp_path: Path) -> None:
    profile = read(tmp_path, NODES + EDGES)
    names = [layer.name for layer in profile.layers]
    assert (profile.name, profile.microbatch_size) == ("small", 100)
    assert names == ["node2-Linear", "node3-ReLU", "node4-LSTM", "node5-__getitem__", "node6-__getitem__", "node7-Add", "node8-Linear"]
    assert all((layer.forward_s, layer.backward_s) == (0.002, 0.003) for layer in profile.layers)
    assert [layer.parameter_bytes for layer in profile.layers] == [880, 0, 2000, 0, 0, 0, 24]
    assert [layer.output_bytes for layer in profile.layers] == [8000, 8000, 2340, 2000, 300, 2000, 500]
    by_name = {(names[edge.producer], names[edge.consumer]): edge.bytes for edge in profile.edges()}
    assert by_name == {
        ("node2-Linear", "node3-ReLU"): 8000,
        ("node3-ReLU", "node4-LSTM"): 8000,
        ("node4-LSTM", "node5-__getitem__"): 2000,
        ("node4-LSTM", "node6-__getitem__"): 300,
        ("node3-ReLU", "node7-Add"): 8000,
        ("node5-__getitem__", "node7-Add"): 2000,
        ("node7-Add", "node8-Linear"): 2000,
    }


def test_a_tensor_is_kept_once_by_the_first_that_computes_with_it(tmp_path: Path) -> None:
    # node3 works in node2's memory, which node4 keeps; node7 adds and keeps nothing; node8 keeps the sum. The rows are node2's.
    assert [layer.saved_bytes for layer in read(tmp_path, NODES + EDGES).layers] == [4000, 0, 8000, 0, 0, 0, 2000]


def test_the_weight_gradient_is_a_share_of_the_backward_where_there_are_weights(tmp_path: Path) -> None:
    layers = read(tmp_path, NODES + EDGES, weight_grad_share=0.25).layers
    assert [layer.weight_grad_s for layer in layers] == pytest.approx([0.00075, 0, 0.00075, 0, 0, 0, 0.00075])


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_from_zero_to_one(tmp_path: Path, share: float) -> None:
    with pytest.raises(InputError, match="expected a share from 0 to 1"):
        read(tmp_path, NODES + EDGES, weight_grad_share=share)


def test_the_order_of_the_lines_does_not_matter(tmp_path: Path) -> None:
    lines = (NODES + EDGES).splitlines(keepends=True)
    expected = read(tmp_path, "".join(lines))
    for seed in range(10):
        shuffled = random.Random(seed).sample(lines, len(lines))
        assert read(tmp_path, "".join(shuffled)) == expected


def test_stages_of_a_plan_in_the_file_are_left_aside(tmp_path: Path) -> None:
    planned = re.sub(r"(parameter_size=[\d.]+)", r"\1 -- stage_id=3", NODES)
    assert read(tmp_path, planned + EDGES) == read(tmp_path, NODES + EDGES)


NODE = "node1 -- Add -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=1.0, parameter_size=0.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no operator that computes"),
        ("node1 -- Input -- " + NODE.split(" -- ")[2], "holds no operator that computes"),
        ("hello", "line 1: expected `node1 -- description"),
        (f"{NODE}\n\n\tnode1 > node2", "line 3: expected an edge, a tab and `node1 -- node2`, got 'node1 > node2'"),
        (f"{NODE}\n\tnode1 -- node2", "line 2: no line describes 'node2'"),
        (f"{NODE}\n{NODE}", "line 2: 'node1' stands in line 1 already"),
        (
            f"{NODE}\n{NODE.replace('node1', 'node2')}\n\tnode1 -- node2\n\tnode1 -- node2",
            "line 4: the edge node1 -- node2 stands in line 3",
        ),
        (f"{NODE}\n\tnode1 -- node1", "line 2: the edges form a cycle: node1 -- node1 (line 2)"),
        (f"{NODE}\n{NODE.replace('node1', 'node2')}\n\tnode1 -- node2\n\tnode2 -- node1", "the edges form a cycle"),
        (NODE.replace("1.0", "-1.0", 1), "line 1: forward_compute_time: expected a number that is not negative, got '-1.0'"),
        (NODE.replace("1.0", "nan", 1), "line 1: forward_compute_time: expected a number that is not negative, got 'nan'"),
        (NODE.replace("activation_size=1.0", "activation_size=[1.0; x]"), "line 1: activation_size: expected a number"),
        (NODE.replace("activation_size=1.0", "activation_size=[]"), "line 1: activation_size: expected a number"),
        (NODE.replace(", activation_size=1.0", ""), "line 1: activation_size is missing; add it"),
        (NODE.replace("activation_size", "activations"), "line 1: expected forward_compute_time=..., backward_compute_time=..., "),
        (NODE + ", parameter_size=0.0", "each once, got 'parameter_size=0.0'"),
    ],
)
def test_what_is_no_such_graph_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)) as refusal:
        read(tmp_path, text)
    assert str(tmp_path / "small.graph.txt") in str(refusal.value)


@pytest.mark.parametrize("name", MODELS)
def test_the_bundled_profiles_lose_nothing(name: str) -> None:
    path = FOLDER / f"{name}.graph.txt"
    profile = read_pipedream(path, microbatch_size=64)
    lines = [line for line in path.read_text().splitlines() if "forward_compute_time" in line and "-- Input" not in line]

    def total(key: str) -> float:
        values = [line.partition(f"{key}=")[2].partition(", ")[0] for line in lines]
        return sum(float(number) for value in values for number in value.strip("[]").split(";"))

    assert profile.num_layers == len(lines) == MODELS[name]
    assert sum(layer.forward_s for layer in profile.layers) == pytest.approx(total("forward_compute_time") / 1e3)
    assert sum(layer.backward_s for layer in profile.layers) == pytest.approx(total("backward_compute_time") / 1e3)
    assert sum(layer.output_bytes for layer in profile.layers) == total("activation_size")
    assert sum(layer.parameter_bytes for layer in profile.layers) == total("parameter_size")
    assert all(edge.producer < edge.consumer for edge in profile.edges())


def test_the_command_writes_a_profile_that_keeps_the_branches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = FOLDER / "resnet50.graph.txt", tmp_path / "profile.json"
    assert main(["profile", "--from-pipedream", str(source), "--microbatch-size", "128", "--name", "r50", "--json", "-o", str(output)]) == 0
    document = json.loads(capsys.readouterr().out)
    profile = ModelProfile.load(output)
    assert (profile.name, profile.microbatch_size, len(profile.edges())) == ("r50", 128, 192)
    assert document["num_layers"] == profile.num_layers == MODELS["resnet50"]
    assert document["layers"][0]["name"] == profile.layers[0].name
    assert document["layers"][0]["spread"] is None
    assert "chain" not in document


def test_the_command_writes_a_chain_when_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["profile", "--from-pipedream", str(FOLDER / "gnmt.graph.txt"), "--microbatch-size", "32", "--chain"]
    assert main([*arguments, "--max-crossing", "2", "-o", str(tmp_path / "profile.json")]) == 0
    printed = capsys.readouterr().out
    profile = ModelProfile.load(tmp_path / "profile.json")
    assert profile.named_edges is None
    assert f"{profile.num_layers} layers (a chain), 32 rows a microbatch" in printed
    assert "tensors" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either CONFIG, to measure its model, or --from-pipedream FILE"),
        (["config.yaml", "--from-pipedream", "graph.txt"], "give either CONFIG"),
        (["--from-pipedream", "graph.txt"], "--from-pipedream needs --microbatch-size"),
        (["--from-pipedream", "graph.txt", "--microbatch-size", "1"], "graph.txt: there is no such file"),
        (["--from-pipedream", "graph.txt", "--microbatch-size", "1", "--repeats", "9"], "--repeats can be used with a measurement only"),
        (["config.yaml", "--weight-grad-share", "0.4"], "--weight-grad-share can be used with --from-pipedream or --from-sailor only"),
        (["config.yaml", "--max-crossing", "2"], "--max-crossing can be used with --chain only"),
        (["config.yaml", "-o", "profile.yaml"], "let it end with .json"),
        (["config.yaml", "-o", "no/such/folder/profile.json"], "its folder does not exist"),
        (["config.yaml"], "config.yaml: there is no such file"),
    ],
)
def test_the_command_refuses_what_does_not_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    output = [] if "-o" in arguments else ["-o", "profile.json"]
    assert main(["profile", *arguments, *output]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert not (tmp_path / "profile.json").exists()
