"""The public functions: a plan from a profile and a topology, its simulation, and schedules by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import raypipe
from raypipe.errors import PlanError, UnknownNameError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.request import ScheduleRequest

PROFILE = raypipe.ModelProfile.uniform(8, forward_s=0.01, backward_s=0.02, output_bytes=1000, parameter_bytes=2000, microbatch_size=2)
CLUSTER = raypipe.ClusterTopology.uniform(4, devices_per_node=2, latency_s=1e-5, bandwidth_bytes_per_s=1e9)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "simulate.py"


def test_a_profile_and_a_topology_make_a_plan_of_sixteen_microbatches() -> None:
    plan = raypipe.plan(PROFILE, CLUSTER, effort=0.02)
    assert plan.schedule.num_microbatches == 16
    assert plan.microbatch_size == PROFILE.microbatch_size
    trace = raypipe.simulate(plan)
    assert isinstance(trace, raypipe.Trace)
    assert plan.predicted is not None
    assert trace.update_s == pytest.approx(plan.predicted.update_s)


def test_files_stand_for_what_they_hold(tmp_path: Path) -> None:
    paths = [tmp_path / "profile.json", tmp_path / "topology.yaml", tmp_path / "plan.json"]
    PROFILE.save(paths[0])
    CLUSTER.save(paths[1])
    plan = raypipe.plan(str(paths[0]), paths[1], 4, schedule="1f1b", planner="1f1b-equal")
    assert plan == raypipe.plan(PROFILE, CLUSTER, 4, schedule="1f1b", planner="1f1b-equal")
    plan.save(paths[2])
    assert raypipe.simulate(paths[2]) == raypipe.simulate(plan)
    assert raypipe.simulate(paths[2], topology=paths[1]) == raypipe.simulate(plan)


def test_a_plan_is_simulated_on_another_topology() -> None:
    plan = raypipe.plan(PROFILE, CLUSTER, 4, planner="1f1b-equal")
    slow = raypipe.ClusterTopology.uniform(4, devices_per_node=2, latency_s=1.0, bandwidth_bytes_per_s=1e9)
    assert raypipe.simulate(plan, topology=slow).update_s > raypipe.simulate(plan).update_s + 2
    with pytest.raises(PlanError, match="does not have"):
        raypipe.simulate(plan, topology=raypipe.ClusterTopology.uniform(2))


def test_the_rows_of_an_update_are_divided_where_they_are_given() -> None:
    plan = raypipe.plan(PROFILE, CLUSTER, batch_size=16, planner="1f1b-equal")
    assert plan.schedule.num_microbatches * plan.microbatch_size == 16
    assert plan.schedule.num_microbatches > 1
    with pytest.raises(PlanError, match=r"batch_size .* microbatch_size"):
        raypipe.plan(PROFILE, CLUSTER, batch_size=16, microbatch_size=2)


def test_limits_and_names_are_those_of_the_command_line() -> None:
    with pytest.raises(UnknownNameError, match="raypipe"):
        raypipe.plan(PROFILE, CLUSTER, planner="rapipe")
    with pytest.raises(PlanError, match="staler than allowed"):
        raypipe.plan(PROFILE, CLUSTER, 4, schedule="pipedream-2bw", max_staleness=0, effort=0.02)


def test_a_schedule_is_built_by_name() -> None:
    assert raypipe.build_schedule("zb-h1", 4, 8) == catalogue.build("zb-h1", ScheduleRequest(4, 8))
    stage = ScheduleRequest(2, 4, 3, num_chunks=2, update_scope=UpdateScope.STAGE)
    assert raypipe.build_schedule("interleaved", 2, 4, num_updates=3, update_scope=UpdateScope.STAGE) == catalogue.build(
        "interleaved", stage
    )


def test_planning_and_simulating_load_neither_ray_nor_torch() -> None:
    program = f"import runpy, sys; runpy.run_path({str(EXAMPLE)!r}); print(sorted({{'ray', 'torch', 'cupy'}} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *lines, heavy = ran.stdout.splitlines()
    assert heavy == "[]"
    assert [line.split()[0] for line in lines] == ["gpipe", "1f1b", "zb-h1", "zb-h2"]
