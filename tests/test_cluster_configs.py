"""The files of cluster_configs: topologies load and are drawn, and what starts the clusters is valid and starts the same ones.

Launcher files are checked against the schema that Ray ships and the options of `ray start`. KubeRay files are read by the code with
which Ray's own autoscaler reads RayCluster resources.
"""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
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
from raypipe.config import RunConfig, TrainConfig
from raypipe.planning.balance import balanced_cut
from raypipe.schedules import catalogue
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.simulator import simulate

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
    expected = (
        {f"{name}.yaml" for name in NAMES}
        | {f"ray/{name}.yaml" for name in LAUNCHED}
        | {"kuberay/Dockerfile", "kuberay/eight_gpus.retried.yaml", "grafana.json", "slurm/train.sbatch"}
    )
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
    path, resume, auto, *options = shlex.split(found[0])
    assert (resume, auto) == ("--resume", "auto"), "the same command starts and goes on"
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
    # Where the supervisors of jobs get their environment from.
    assert all("export RAY_JOB_STOP_WAIT_TIME_S=60;" in command for command in content["head_start_ray_commands"] if "ray start" in command)
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


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launcher_file_gives_all_nodes_the_token_of_ray(name: str) -> None:
    content = launcher(name)
    assert content["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("export RAY_AUTH_MODE=token" in command for command in content["setup_commands"])
    assert "ray get-auth-token --generate" in opening(CONFIGS / "ray" / f"{name}.yaml")


# KubeRay.


def kuberay_text(name: str, kind: str) -> str:
    return (CONFIGS / "kuberay" / f"{name}.{kind}.yaml").read_text()


def groups_of(cluster: Any) -> list[Any]:
    """The group of pods of each node, the head first."""
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"].get("workerGroupSpecs", [])]


def node_types(cluster: Any) -> list[Any]:
    """What Ray's autoscaler reads about each group: resources, labels and numbers of pods."""
    reader = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    served = {"metadata": {"namespace": "default"} | cluster["metadata"], "spec": {"workerGroupSpecs": []} | cluster["spec"]}
    config = reader._derive_autoscaling_config_from_ray_cr(served)
    return list(config["available_node_types"].values())


def check_cluster(name: str, text: str) -> None:
    """Fail unless a RayCluster resource starts the nodes, devices and GPUs of a topology."""
    cluster = yaml.safe_load(text)
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert cluster["metadata"]["name"] == name.replace("_", "-")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    for node, group, node_type in zip(topology(name).nodes, groups_of(cluster), node_types(cluster), strict=True):
        gpus = num_gpus(name)[node.name]
        resources = node_type["resources"]
        assert node_type["labels"] == {NODE_LABEL: node.name}
        # With more CPUs than devices, the first nodes would take the devices of the others.
        assert resources["CPU"] == len(node.devices)
        assert resources.get("GPU", 0) == gpus
        if not gpus:
            assert resources["memory"] == sum(device.memory_bytes or 0 for device in node.devices)
        if group is not cluster["spec"]["headGroupSpec"]:
            assert node_type["min_workers"] == group["replicas"] == node_type["max_workers"] == 1
        # The operator refuses other types, and labels in this place.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert "labels" not in group["rayStartParams"]
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        wait = {variable["name"]: variable["value"] for variable in container["env"]}["RAY_JOB_STOP_WAIT_TIME_S"]
        assert int(wait) > RunConfig().grace_s, "`ray job stop` leaves time to save"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert ray_config(name).run.storage_path in {mount["mountPath"] for mount in container["volumeMounts"]}


def check_job(name: str, text: str) -> None:
    """Fail unless a RayJob resource trains on all devices of the cluster, and leaves the cluster as it is."""
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"].keys() == {"clusterSelector", "entrypoint"}
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": name.replace("_", "-")}
    assert f"kubectl get rayjob {job['metadata']['name']} " in opening(CONFIGS / "kuberay" / f"{name}.job.yaml")
    trains(train_config(job["spec"]["entrypoint"]), name)


CHECKS = {"cluster": check_cluster, "job": check_job}


def ray_config(name: str) -> TrainConfig:
    return train_config(yaml.safe_load(kuberay_text(name, "job"))["spec"]["entrypoint"])


@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_kuberay_file_starts_or_uses_the_cluster_of_its_topology(name: str, kind: str) -> None:
    CHECKS[kind](name, kuberay_text(name, kind))
    assert f"kubectl apply -f cluster_configs/kuberay/{name}.{kind}.yaml" in opening(CONFIGS / "kuberay" / f"{name}.{kind}.yaml")


def test_a_job_that_kuberay_retries_has_a_cluster_of_its_own_and_goes_on() -> None:
    path = CONFIGS / "kuberay" / "eight_gpus.retried.yaml"
    job, spec = yaml.safe_load(path.read_text()), yaml.safe_load(path.read_text())["spec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert spec.keys() == {"backoffLimit", "shutdownAfterJobFinishes", "entrypoint", "rayClusterSpec"}
    assert spec["backoffLimit"] > 0
    assert spec["rayClusterSpec"] == yaml.safe_load(kuberay_text("eight_gpus", "cluster"))["spec"]
    assert spec["entrypoint"] == yaml.safe_load(kuberay_text("eight_gpus", "job"))["spec"]["entrypoint"]
    assert "--resume auto" in spec["entrypoint"]
    volumes = {volume["name"]: volume for volume in spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]}
    assert "persistentVolumeClaim" in volumes["runs"], "runs outlive the pods of an attempt"
    assert f"kubectl get rayjob {job['metadata']['name']} " in opening(path)


def test_no_key_of_the_kuberay_files_is_misspelled() -> None:
    files = {(name, kind): set(keys_of(yaml.safe_load(kuberay_text(name, kind)))) for name in NAMES for kind in CHECKS}
    counts = Counter(key for keys in files.values() for key in keys)
    once = {key for key, count in counts.items() if count == 1 and "/" not in key}  # a key with a slash is a label
    assert once == {"emptyDir"}, "a key that no other file has is probably misspelled"


def keys_of(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from part
        for value in part.values():
            yield from keys_of(value)
    elif isinstance(part, list):
        for value in part:
            yield from keys_of(value)


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
        cluster = yaml.safe_load(kuberay_text(name, "cluster"))
        assert cluster["spec"]["rayVersion"] == constraint[1]
        assert {group["template"]["spec"]["containers"][0]["image"] for group in groups_of(cluster)} == {image[1]}
        assert yaml.safe_load(kuberay_text(name, "job"))["spec"]["entrypoint"].startswith(f"cd {folder[1]} && ")


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("laptop.cluster", "kind: RayCluster", "kind: RayService"),
        ("laptop.cluster", "apiVersion: ray.io/v1", "apiVersion: ray.io/v2"),
        ("laptop.cluster", "headGroupSpec", "headGroup"),
        ("laptop.cluster", 'num-cpus: "4"', "num-cpus: 4"),
        ("laptop.cluster", "num-cpus:", "labels: a=b, num-cpus:"),
        ("laptop.cluster", "raypipe.io/node: laptop", "raypipe.io/node: -laptop"),
        ("laptop.cluster", "{name: runs, mountPath", "{name: run, mountPath"),
        ("laptop.cluster", 'requests: {cpu: "2"', 'requests: {cpu: "3"'),
        ("laptop.cluster", "memory: 8G", "memory: 8 GB"),
        ("laptop.cluster", "name: laptop\n", "name: the_laptop\n"),
        ("mixed_lab.cluster", "groupName: lab2", "groupName: lab1"),
        ("mixed_lab.cluster", "minReplicas: 1", "minReplicas: 2"),
        ("mixed_lab.cluster", 'limits: {cpu: "8", memory: 32Gi, nvidia.com/gpu: "2"}', "limits: {}"),
        ("laptop.job", "clusterSelector: {ray.io/cluster: laptop}", "backoff: 1"),
        ("laptop.job", "clusterSelector: {ray.io/cluster: laptop}", "clusterSelector: {}"),
        ("laptop.job", "clusterSelector:", "shutdownAfterJobFinishes: true\n  clusterSelector:"),
    ],
)
def test_a_mistake_in_a_kuberay_file_is_found(file: str, right: str, wrong: str) -> None:
    name, kind = file.split(".")
    text = kuberay_text(name, kind)
    assert right in text
    with pytest.raises((AssertionError, KeyError, ValueError, ArithmeticError)):
        CHECKS[kind](name, text.replace(right, wrong, 1))
