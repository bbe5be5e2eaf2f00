"""Which cores actors keep to, by what a system says of its cores and GPUs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from raypipe.actors import cores
from raypipe.actors.cores import NodePosition


def shares(num_cores: int, num_actors: int, num_threads: int = 1) -> list[list[int]]:
    return [cores.share(range(num_cores), NodePosition(position, num_actors), num_threads=num_threads) for position in range(num_actors)]


def test_a_node_of_many_cores_is_shared_equally_and_no_core_twice() -> None:
    assert shares(8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shares(7, 3) == [[0, 1], [2, 3], [4, 5]]
    assert shares(4, 1) == [[0, 1, 2, 3]]


def test_where_threads_are_more_than_cores_all_may_use_all() -> None:
    assert shares(2, 3) == [[0, 1]] * 3
    assert shares(4, 2, num_threads=2) == [[0, 1], [2, 3]]
    assert shares(4, 2, num_threads=3) == [[0, 1, 2, 3]] * 2


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets of two cores with two threads each, numbered as Linux does: the second threads behind all first ones."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for number in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{number % 4 // 2}\n")
        (folder / "core_id").write_text(f"{number % 2}\n")
    return tmp_path


def test_cores_of_a_socket_and_threads_of_a_core_are_next_to_each_other(system: Path) -> None:
    assert cores.usable(system) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_an_actor_of_a_gpu_gets_the_cores_next_to_it(system: Path) -> None:
    folder = system / "bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("2-3,6-7\n")
    assert cores.near_pci("0000:1b:00.0", system) == [2, 6, 3, 7]


@pytest.mark.parametrize("text", [None, "", "\n", "what", "64-127\n"])
def test_where_the_system_tells_nothing_of_use_it_keeps_all(system: Path, text: str | None) -> None:
    folder = system / "bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "local_cpulist").write_text(text)
    assert sorted(cores.near_pci("0000:1b:00.0", system)) == list(range(8))


def test_a_system_without_descriptions_of_cores_has_them_in_order(tmp_path: Path) -> None:
    assert cores.usable(tmp_path) == sorted(os.sched_getaffinity(0))


V1, V2 = "4:cpu,cpuacct:/{path}\n2:memory:/m\n", "0::/{path}\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {}, 8),
        (V2, {"cpu.max": "max 100000"}, 8),
        (V2, {"cpu.max": "250000 100000"}, 2),  # of a container with a view of its own
        (V2, {"pod/cpu.max": "300000 100000", "pod/one/cpu.max": "max 100000"}, 3),  # the group above is limited
        (V2, {"cpu.max": "50000 100000"}, 1),
        (V2, {"cpu.max": "what"}, 8),
        ("0::/gr\u00fc\u00dfe\n", {"cpu.max": "200000 100000"}, 8),
        (V1, {"cpu/pod/one/cpu.cfs_quota_us": "400000", "cpu/pod/one/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (V1, {"cpu/cpu.cfs_quota_us": "1600000", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_a_container_has_as_many_cores_as_its_limit_allows(system: Path, groups: str, files: dict[str, str], expected: int) -> None:
    own = system / "cgroup"
    own.write_text(groups.format(path="pod/one"))
    for name, text in files.items():
        file = system / "fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert cores.num_usable(system, own) == expected


def test_a_system_without_control_groups_has_all_cores(system: Path) -> None:
    assert cores.num_usable(system, system / "none") == 8


def test_all_threads_of_a_process_are_bound_and_those_that_come() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    found: dict[str, set[int]] = {}
    bound, ended = threading.Event(), threading.Event()

    def look(name: str) -> None:
        assert bound.wait(10)
        found[name] = os.sched_getaffinity(0)
        ended.set()

    there = threading.Thread(target=look, args=("there",))
    there.start()
    try:
        cores.bind(allowed[:1])
        bound.set()
        there.join(10)
        coming = threading.Thread(target=look, args=("coming",))
        coming.start()
        coming.join(10)
    finally:
        cores.bind(allowed)
    assert found == {"there": {allowed[0]}, "coming": {allowed[0]}}
