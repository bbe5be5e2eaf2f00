"""What a probe makes of its budget, of links in company, and of measurements that fail: on simulated nodes, by their clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.actors.actor_info import ActorInfo
from raypipe.actors.measure.flows import SMALL_BYTES, Flow, Readings, Stream
from raypipe.cli import main
from raypipe.cluster.probe_actors import FlowReadings, ProbeActors
from raypipe.cluster.prober import Probe, Probed, probe
from raypipe.cluster.slots import ClusterNode, unique_name
from raypipe.config import ClusterConfig, calibration_file
from raypipe.errors import FormatError, PlanError, RunError
from raypipe.network.probe_budget import Budget
from raypipe.network.rounds import Pair
from tests.network.max_min import Network

MB = 1e6
LATENCY_S = 1e-4
STEP_S = 0.08
"""What a round takes besides: more than the prober expects."""


class Simulated(ProbeActors):
    """Nodes with one device each, whose flows take the time that a network of fair flows lets them take."""

    def __init__(self, num_nodes: int, network: Network, *, fails_at: int | None, missing: Collection[Pair] = ()) -> None:
        nodes = [ClusterNode(f"id-{number}", f"10.0.0.{number}", num_cpus=1.0) for number in range(num_nodes)]
        names = [node.address for node in nodes]
        super().__init__([node.slots(1) for node in nodes], names, [None] * num_nodes)
        self.infos = {number: ActorInfo(f"id-{number}", name, name, 1, 1, 1 << 30, True, ()) for number, name in enumerate(names)}
        self.network = network
        self.fails_at = fails_at
        self.missing = missing
        self.num_streamed = 0
        self.now_s = 0.0

    def unreachable(self, pairs: Collection[Pair]) -> set[Pair]:
        return set(pairs) & set(self.missing)

    def monotonic(self) -> float:
        return self.now_s

    def run(self, flows: Sequence[Flow], *, limit_s: float | None = None) -> FlowReadings:
        rates = self.network.together(tuple(flow.ends for flow in flows))
        found = {flow.ends: self.flow(flow, rates[flow.ends]) for flow in flows}
        last_s = max(target.first_s[-1] for _, target in found.values())
        if any(isinstance(flow.pattern, Stream) for flow in flows):
            assert limit_s is not None
            assert last_s - self.now_s < limit_s
            self.num_streamed += 1
            if self.num_streamed == self.fails_at:
                raise RunError("measuring: no answer within 40 s from device 10.0.0.1/0")
        self.num_steps += 1
        self.num_bytes += sum(source.num_bytes for source, _ in found.values())
        self.now_s = last_s + STEP_S
        return found

    def flow(self, flow: Flow, bytes_per_s: float) -> tuple[Readings, Readings]:
        source, target, now_s = Readings(), Readings(), self.now_s
        if isinstance(flow.pattern, Stream):
            sizes, answer_s = [flow.pattern.chunk_bytes] * flow.pattern.num_chunks, 0.0
        else:
            largest = int(bytes_per_s * flow.pattern.seconds / 8)
            sizes, answer_s = [*[SMALL_BYTES] * 4, *[largest // share for share in (1, 2, 4, 8, 16)] * 4], LATENCY_S
        for size in sizes:
            arrived_s = now_s + answer_s + size / bytes_per_s
            source.add(size, now_s, arrived_s + answer_s)
            target.add(size, arrived_s, arrived_s)
            now_s = arrived_s + answer_s
        return source, target


Probing = Callable[..., Probed]


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Probing:
    """Probes simulated nodes."""

    def of(
        num_nodes: int,
        network: Network,
        budget: Budget | None = None,
        *,
        fails_at: int | None = None,
        gpu_kind: str = "",
        missing: Collection[Pair] = (),
    ) -> Probed:
        cluster = Simulated(num_nodes, network, fails_at=fails_at, missing=missing)
        cluster.infos = {number: replace(info, gpu_kind=gpu_kind, gpu_bytes=80 << 30) for number, info in cluster.infos.items()}
        monkeypatch.setattr("raypipe.cluster.node_links.time", cluster)
        return Probe(cluster, [()] * num_nodes, budget or Budget(), notice=lambda _: None).run("simulated", None)

    return of


def limited_nodes(num_nodes: int) -> Network:
    """Equal nodes on one switch."""
    pairs = list(itertools.permutations(range(num_nodes), 2))
    limits = [frozenset(pair for pair in pairs if pair[end] == node) for node in range(num_nodes) for end in (0, 1)]
    return Network(dict.fromkeys(pairs, 125 * MB), [(125 * MB, members) for members in limits], noise=0.02)


def islands(num_nodes: int) -> Network:
    """Two islands; what one node can send alone, all of an island can send to the other one."""
    pairs = list(itertools.permutations(range(num_nodes), 2))
    near = set(range(num_nodes // 2))
    uplinks = [frozenset(pair for pair in pairs if (pair[0] in near, pair[1] in near) == ends) for ends in ((True, False), (False, True))]
    return Network(dict.fromkeys(pairs, 100 * MB), [(100 * MB, members) for members in uplinks], noise=0.02)


def linked_alone(num_nodes: int, missing: Collection[Pair]) -> Network:
    """Equal links of their own, and none between missing pairs: who uses those fails."""
    pairs = [pair for pair in itertools.permutations(range(num_nodes), 2) if (min(pair), max(pair)) not in missing]
    return Network(dict.fromkeys(pairs, 100 * MB), [], noise=0.02)


@pytest.mark.parametrize("num_nodes", [3, 4, 6])
def test_pairs_that_do_not_reach_each_other_are_pairs_without_a_link(probed: Probing, num_nodes: int) -> None:
    missing = {(0, 2), (1, num_nodes - 1)} - {(1, 2)} if num_nodes > 3 else {(0, 2)}
    found = probed(num_nodes, linked_alone(num_nodes, missing), missing=missing)
    assert found.missing == tuple(sorted(missing))
    assert found.topology.default_link is None
    names = [node.name for node in found.topology.nodes]
    for one, other in itertools.combinations(range(num_nodes), 2):
        ends = f"{names[one]}/0", f"{names[other]}/0"
        assert [found.topology.reach(*pair).exists for pair in (ends, ends[::-1])] == [(one, other) not in missing] * 2
    assert sum("do not reach each other" in text for text in found.notices) == len(missing)
    assert all(node.clock is not None for node in found.nodes)


def test_a_node_that_none_reaches_has_no_links_and_no_clock(probed: Probing) -> None:
    missing = {(0, 2), (1, 2)}
    found = probed(3, linked_alone(3, missing), missing=missing)
    assert [node.clock is None for node in found.nodes] == [False, False, True]
    assert len(found.topology.islands) == 2
    assert any("shared links were not looked for: no links lead" in text for text in found.notices)


def test_of_nodes_of_which_none_reaches_another_only_the_insides_are_known(probed: Probing) -> None:
    found = probed(2, linked_alone(2, {(0, 1)}), missing={(0, 1)})
    assert found.links == {}
    assert found.topology.links == ()
    assert found.topology.default_link is None


def bandwidths(found: Probed) -> list[float]:
    return [link.bandwidth_bytes_per_s for link in found.links.values()]


@pytest.mark.parametrize("num_nodes", [3, 6, 8])
def test_equal_nodes_all_have_their_limits(probed: Probing, num_nodes: int) -> None:
    found = probed(num_nodes, limited_nodes(num_nodes))
    assert {shared.name.split("-")[1] for shared in found.topology.shared_links} == {"egress", "ingress"}
    assert [shared.bandwidth_bytes_per_s for shared in found.topology.shared_links] == [pytest.approx(125 * MB, rel=0.1)] * 2 * num_nodes
    assert found.seconds < 40
    assert [text for text in found.notices if "shared" in text] == []


def test_gpus_are_described_with_their_kind_and_their_own_memory(probed: Probing) -> None:
    cpus, gpus = (probed(2, limited_nodes(2), gpu_kind=kind).topology for kind in ("", "nvidia-h200"))
    assert [(device.kind, device.memory_bytes) for device in gpus.devices] == [("nvidia-h200", 80 << 30)] * 2
    assert [node.cores for node in gpus.nodes] == [None, None]
    assert [(device.kind, device.memory_bytes) for device in cpus.devices] == [("cpu", 1 << 30)] * 2
    assert [node.cores for node in cpus.nodes] == [1, 1]


@pytest.mark.parametrize("fails_at", [None, 60])
def test_of_equal_nodes_none_has_a_limit_if_not_all_were_looked_at(probed: Probing, fails_at: int | None) -> None:
    found = probed(8, limited_nodes(8), Budget(seconds=60.0 if fails_at else 14.0), fails_at=fails_at)
    assert found.topology.shared_links == ()
    assert "no answer within 40 s" in found.notices[0] if fails_at else "the budget was spent" in found.notices[0]
    assert "limits of single nodes were left out" in found.notices[0]
    assert found.seconds < 60
    assert bandwidths(found) == [pytest.approx(125 * MB, rel=0.1)] * 56


def test_links_have_what_they_have_alone_though_all_were_measured_in_company(probed: Probing) -> None:
    found = probed(8, islands(8))
    assert [len(shared.members) for shared in found.topology.shared_links] == [16, 16]
    assert bandwidths(found) == [pytest.approx(100 * MB, rel=0.15)] * 56
    assert found.seconds < 60.5


@pytest.mark.parametrize(("seconds", "what"), [(12.0, "shared links were not looked for"), (16.0, "the budget was spent")])
def test_links_that_were_in_company_and_not_measured_again_are_named(probed: Probing, seconds: float, what: str) -> None:
    found = probed(8, islands(8), Budget(seconds=seconds))
    notice = next((text for text in found.notices if "may carry more than was seen" in text), "")
    slow = [pair for pair, link in found.links.items() if link.bandwidth_bytes_per_s < 80 * MB]
    assert what in found.notices[0]
    assert bool(slow) == bool(notice)
    assert found.seconds < seconds + 1
    if slow:
        assert f"and {len(slow) - 6} more" in notice


def test_a_round_that_fails_ends_the_search_and_not_the_probe(probed: Probing) -> None:
    found = probed(8, islands(8), fails_at=5)
    assert "not all shared links were looked for: measuring: no answer within 40 s from device 10.0.0.1/0" in found.notices[0]
    assert "may carry more than was seen: 10.0.0" in found.notices[1]
    assert len(found.topology.links) >= 28


# Names, and files that are looked at first


def test_a_node_is_called_by_its_label_and_else_by_its_address() -> None:
    plain, named, other = ClusterNode("a", "10.0.0.1"), ClusterNode("b", "10.0.0.2", label="lab"), ClusterNode("c", "10.0.0.2", label="lib")
    assert [unique_name(node, [plain, named, other]) for node in (plain, named, other)] == ["10.0.0.1", "lab", "lib"]
    assert unique_name(named, [plain, named, ClusterNode("d", "10.0.0.3", label="lab")]) == "10.0.0.2"


def test_nodes_that_cannot_be_told_apart_are_refused() -> None:
    twins = [ClusterNode("aaaaaaaaaa", "10.0.0.1"), ClusterNode("bbbbbbbbbb", "10.0.0.1")]
    with pytest.raises(
        PlanError, match=r"the nodes aaaaaaaa, bbbbbbbb share its address; start each with a label, .*--labels=raypipe.io/node=NAME"
    ):
        unique_name(twins[0], twins)


def test_a_calibration_that_cannot_be_read_is_refused_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration_file().parent.mkdir()
    calibration_file().write_text("{")
    with pytest.raises(FormatError, match=calibration_file().name):
        probe(ClusterConfig(address="10.255.255.1:1"))


def test_a_file_without_a_folder_is_refused_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--address", "10.255.255.1:1", "-o", str(tmp_path / "none" / "topology.yaml")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    assert main(["probe", "--address", "10.255.255.1:1", "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_a_machine_that_stands_still_for_a_moment_does_not_make_its_links_slower(probed: Probing, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Simulated.flow

    def disturbed(cluster: Simulated, one: Flow, bytes_per_s: float) -> tuple[Readings, Readings]:
        still = 0.5 < cluster.now_s < 1.5 and one.target == 0
        return flow(cluster, one, bytes_per_s * (0.92 if still else 1.0))

    monkeypatch.setattr(Simulated, "flow", disturbed)
    pairs = list(itertools.permutations(range(4), 2))
    found = probed(4, Network(dict.fromkeys(pairs, 125 * MB)))
    assert {pair: link.bandwidth_bytes_per_s for pair, link in found.links.items()} == dict.fromkeys(
        pairs, pytest.approx(125 * MB, rel=0.01)
    )
