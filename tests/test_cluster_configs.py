"""The files of cluster_configs: topologies load and are drawn, and what starts the clusters is valid and starts the same ones.

Launcher files are checked against the schema that Ray ships and the options of `ray start`; KubeRay files against `tests.kuberay`.
"""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.artifacts.plan import make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cli import main
from raypipe.cluster.node_matching import is_gpu
from raypipe.cluster.slots import NODE_LABEL
from raypipe.config import TrainConfig
from raypipe.planning.balance import balanced_cut
from raypipe.schedules import catalogue
from raypipe.schedules.ir import ScheduleRequest
from raypipe.simulation.simulator import simulate
from tests import kuberay

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "cluster_configs"
NAMES = ("laptop", "eight_gpus", "two_islands", "mixed_lab")
LAUNCHED = ("eight_gpus", "two_islands", "mixed_lab")


def topology(name: str) -> ClusterTopology:
    return ClusterTopology.load(CONFIGS / f"{name}.yaml")


def opening(path: Path) -> str:
    """The comment at the top of a file."""
    lines = path.read_text().splitlines()
    return "\n".join(line.removeprefix("#").strip() for line in lines[: next(n for n, line in enumerate(lines) if line[:1] != "#")])


def num_gpus(name: str) -> dict[str, int]:
    """How many GPUs each node of a topology has."""
    return {node.name: sum(map(is_gpu, node.devices)) for node in topology(name).nodes}


def test_all_files_are_known_to_the_readme_and_to_these_tests() -> None:
    readme = (CONFIGS / "README.md").read_text()
    files = {str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*") if path.is_file()} - {"README.md"}
    assert {name for name in files if f"`{name}`" not in readme} == set()
    expected = {f"{name}.yaml" for name in NAMES} | {f"ray/{name}.yaml" for name in LAUNCHED} | {"kuberay/Dockerfile"}
    assert files == expected | {f"kuberay/{name}.{kind}.yaml" for name in NAMES for kind in ("cluster", "job")}


@pytest.mark.parametrize("name", NAMES)
def test_a_topology_says_where_its_figures_are_from(name: str) -> None:
    assert re.search(r"figures are (assumed|measured)|not measurements", opening(CONFIGS / f"{name}.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_show_draws_a_topology(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / f"{name}.yaml")
    assert main(["show", file]) == 0
    drawn = capsys.readouterr().out
    assert main(["show", file, "-o", str(tmp_path / "out.svg")]) == 0
    svg = ET.parse(tmp_path / "out.svg").getroot()
    texts = " ".join("".join(element.itertext()) for element in svg.iter())
    for node in topology(name).nodes:
        assert node.name in drawn
        assert node.name in texts


@pytest.mark.parametrize("name", NAMES)
def test_a_model_can_be_planned_and_simulated_on_a_topology(name: str) -> None:
    machines = topology(name)
    count = machines.num_devices
    profile = ModelProfile.uniform(count, forward_s=0.01, backward_s=0.02, output_bytes=10**6, saved_bytes=10**6, parameter_bytes=10**6)
    schedule = catalogue.build("1f1b", ScheduleRequest(count, 2 * count, 1))
    plan = make_plan(
        name=name,
        planner="balance",
        cut=balanced_cut(profile, count),
        schedule=schedule,
        profile=profile,
        topology=machines,
        devices=tuple(device.name for device in machines.devices),
        microbatch_size=1,
    )
    trace = simulate(plan)
    slowest = min(device.speed for device in machines.devices)
    assert trace.makespan_s >= 2 * count * 0.03 / slowest


def test_devices_of_the_lab_differ_in_speed_and_the_islands_in_size() -> None:
    assert len({device.speed for device in topology("mixed_lab").devices}) == 4
    islands = topology("two_islands")
    across = islands.path("north0/0", "south0/0")
    assert [name for name, _ in across.resources if name == "southward"] == ["southward"]
    assert [name for name, _ in islands.path("north1/2", "south0/3").resources if name == "southward"] == ["southward"]
    assert across.bandwidth_bytes_per_s < islands.path("north0/0", "north1/0").bandwidth_bytes_per_s / 5
    assert num_gpus("two_islands") == {"north0": 4, "north1": 4, "south0": 4}


def train_config(command: str) -> TrainConfig:
    """The configuration of the one `raypipe train FILE --set KEY=VALUE ...` that a shell command holds."""
    found = re.findall(r"raypipe train ([^'&;]*)", command)
    assert len(found) == 1, command
    path, *options = shlex.split(found[0])
    assert options[0::2] == ["--set"] * (len(options) // 2)
    return TrainConfig.load(ROOT / path, overrides=options[1::2])


def trains(config: TrainConfig, name: str) -> None:
    """Asserts that a configuration can use all devices of a cluster."""
    assert config.scaling.num_devices == topology(name).num_devices
    layers = config.model.options["num_layers"] + 2  # embedding and head
    assert layers >= config.scaling.num_devices


# Ray's cluster launcher.


def launcher(name: str) -> Any:
    return yaml.safe_load((CONFIGS / "ray" / f"{name}.yaml").read_text())


@pytest.fixture(scope="module")
def launcher_schema() -> Any:
    ray_autoscaler = pytest.importorskip("ray.autoscaler")
    return json.loads((Path(ray_autoscaler.__file__).parent / "ray-schema.json").read_text())


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launcher_file_fits_the_schema_of_ray(name: str, launcher_schema: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    content = launcher(name)
    jsonschema.validate(content, launcher_schema)
    for wrong in (
        content | {"head_nod_type": "server"},
        {key: value for key, value in content.items() if key != "provider"},
        content | {"setup_commands": "pip install raypipe"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, launcher_schema)


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launcher_file_starts_ray_with_options_that_it_has(name: str) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    known = {option for parameter in scripts.start.params for option in parameter.opts}
    content = launcher(name)
    commands = content["head_start_ray_commands"] + content["worker_start_ray_commands"]
    starts = [command.split("ray start")[1] for command in commands if "ray start" in command]
    assert starts
    for start in starts:
        options = shlex.split(start)
        assert {option.split("=")[0] for option in options} <= known
        assert any(option.startswith(f"--labels={NODE_LABEL}=") for option in options)
        assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start or "--address=$RAY_HEAD_IP:6379" in start


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launcher_file_starts_the_nodes_of_its_topology(name: str) -> None:
    content = launcher(name)
    wanted = num_gpus(name)
    assert content["cluster_name"] == name.replace("_", "-")
    if content["provider"]["type"] == "local":  # the machines' own GPUs are found by Ray
        provider = content["provider"]
        assert [provider["head_ip"], *provider["worker_ips"]] == list(wanted)
        commands = [*content["head_start_ray_commands"], *content["worker_start_ray_commands"]]
        starts = [command for command in commands if "ray start" in command]
        assert len(starts) == 2
        # As many places as GPUs: with more, the first nodes would take the devices of the others.
        assert all("$(hostname -s)" in start and '--num-cpus="$(nvidia-smi -L | wc -l)"' in start for start in starts)
    else:
        (head,) = wanted
        machine = content["available_node_types"][content["head_node_type"]]
        assert (content["max_workers"], machine["resources"]) == (0, {"CPU": wanted[head], "GPU": wanted[head]})
        assert f" --num-cpus={wanted[head]} " in content["head_start_ray_commands"][-1]
        assert f"--labels={NODE_LABEL}={head} " in content["head_start_ray_commands"][-1]


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_command_at_the_top_of_a_launcher_file_trains_on_all_devices(name: str) -> None:
    text = opening(CONFIGS / "ray" / f"{name}.yaml").replace("\\\n", " ")
    config = train_config(text)
    trains(config, name)
    assert config.cluster.address == "auto"
    for verb in ("up", "exec", "down"):
        assert f"ray {verb} cluster_configs/ray/{name}.yaml" in text


# KubeRay.


def ray_cluster(name: str) -> kuberay.RayCluster:
    read = kuberay.read((CONFIGS / "kuberay" / f"{name}.cluster.yaml").read_text())
    assert isinstance(read, kuberay.RayCluster)
    return read


def ray_job(name: str) -> kuberay.RayJob:
    read = kuberay.read((CONFIGS / "kuberay" / f"{name}.job.yaml").read_text())
    assert isinstance(read, kuberay.RayJob)
    return read


@pytest.mark.parametrize("name", NAMES)
def test_a_ray_cluster_has_the_nodes_devices_and_gpus_of_its_topology(name: str) -> None:
    spec = ray_cluster(name).spec
    assert all(worker.replicas == 1 for worker in spec.workerGroupSpecs)
    groups = [spec.headGroupSpec, *spec.workerGroupSpecs]
    gpus = {group.labels[NODE_LABEL]: int(group.resources.limits.get("nvidia.com/gpu", "0")) for group in groups}
    assert gpus == num_gpus(name)
    for node, group in zip(topology(name).nodes, groups, strict=True):
        # With more places, the first nodes would take the devices of the others.
        assert group.rayStartParams["num-cpus"] == str(len(node.devices))
        if not any(map(is_gpu, node.devices)):
            assert kuberay.amount(group.resources.limits["memory"]) == sum(device.memory_bytes or 0 for device in node.devices)
        mounts = {mount.mountPath for mount in group.template.spec.containers[0].volumeMounts}
        assert ray_config(name).run.storage_path in mounts


def ray_config(name: str) -> TrainConfig:
    return train_config(ray_job(name).spec.entrypoint)


@pytest.mark.parametrize("name", NAMES)
def test_a_ray_job_trains_on_all_devices_of_its_cluster(name: str) -> None:
    job = ray_job(name)
    assert job.spec.clusterSelector == {"ray.io/cluster": ray_cluster(name).metadata.name}
    trains(ray_config(name), name)
    for kind in ("cluster", "job"):
        assert f"kubectl apply -f cluster_configs/kuberay/{name}.{kind}.yaml" in opening(CONFIGS / "kuberay" / f"{name}.{kind}.yaml")
    assert f"kubectl get rayjob {job.metadata.name} " in opening(CONFIGS / "kuberay" / f"{name}.job.yaml")


def test_pods_run_the_image_of_the_dockerfile_with_the_ray_that_is_tested() -> None:
    dockerfile = (CONFIGS / "kuberay" / "Dockerfile").read_text()
    constraint = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    image = re.search(r"-t (\S+) \.", dockerfile)
    folder = re.search(r"^WORKDIR (.*)$", dockerfile, re.MULTILINE)
    assert constraint
    assert image
    assert folder
    assert f"FROM rayproject/ray:{constraint[1]}-py311-" in dockerfile
    for source in re.findall(r"^COPY --chown=ray (.*) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / part).exists() for part in source.split())
    for name in NAMES:
        spec = ray_cluster(name).spec
        assert spec.rayVersion == constraint[1]
        assert {group.template.spec.containers[0].image for group in (spec.headGroupSpec, *spec.workerGroupSpecs)} == {image[1]}
        assert ray_job(name).spec.entrypoint.startswith(f"cd {folder[1]} && ")


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("laptop.cluster", "kind: RayCluster", "kind: RayService", "RayService"),
        ("laptop.cluster", "apiVersion: ray.io/v1", "apiVersion: ray.io/v2", "ray.io/v1"),
        ("laptop.cluster", "headGroupSpec", "headGroup", "headGroupSpec"),
        ("laptop.cluster", 'num-cpus: "4"', "num-cpus: 4", "string"),
        ("laptop.cluster", "num-cpus:", "labels: a=b, num-cpus:", "use the group's labels"),
        ("laptop.cluster", "{name: runs, mountPath", "{name: run, mountPath", "no volume of the pod"),
        ("laptop.cluster", 'requests: {cpu: "2"', 'requests: {cpu: "3"', "above the limit"),
        ("laptop.cluster", "memory: 8G", "memory: 8 GB", "a quantity"),
        ("laptop.cluster", "name: laptop\n", "name: the_laptop\n", "match pattern"),
        ("mixed_lab.cluster", "groupName: lab2", "groupName: lab1", "two worker groups"),
        ("mixed_lab.cluster", "minReplicas: 1", "minReplicas: 2", "minReplicas <= replicas"),
        ("mixed_lab.cluster", 'limits: {cpu: "8", memory: 32Gi, nvidia.com/gpu: "2"}', "limits: {}", "request and limit must be equal"),
        ("laptop.job", "clusterSelector: {ray.io/cluster: laptop}", "backoff: 1", "backoff"),
        ("laptop.job", "clusterSelector: {ray.io/cluster: laptop}", "clusterSelector: {}", "either a clusterSelector or"),
        ("laptop.job", "clusterSelector:", "shutdownAfterJobFinishes: true\n  clusterSelector:", "only selects"),
    ],
)
def test_a_mistake_in_a_kuberay_file_is_found(file: str, right: str, wrong: str, message: str) -> None:
    text = (CONFIGS / "kuberay" / f"{file}.yaml").read_text()
    assert right in text
    with pytest.raises(ValueError, match=re.escape(message)):
        kuberay.read(text.replace(right, wrong, 1))
