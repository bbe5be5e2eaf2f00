"""What is simulated of runs that others measured on GPU clusters stays near what they took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from measured_clusters import DATA, Run, cross_fitted, error, fitted_share, judged, main, mean_error, read_runs

from raypipe.profiling.sailor import SailorData
from raypipe.simulation.simulator import simulate

DATA_OF_SAILOR = SailorData(DATA)
RUNS = {run.name: run for run in read_runs(DATA_OF_SAILOR, DATA / "runs.json")}


def test_the_iterations_of_the_measured_runs_are_within_7_percent_in_the_mean() -> None:
    shares = cross_fitted(list(RUNS.values()))
    results = [judged(run, shares[run.name]) for run in RUNS.values()]
    assert len(results) == 16
    assert mean_error(results) < 0.07
    assert mean_error(results, "sailor_error") == pytest.approx(0.084, abs=0.001)


def test_a_run_becomes_a_plan_with_its_stages_groups_and_rows() -> None:
    plan = RUNS["mit/N4/N4_D2"].plan(1.0)
    assert [len(stage) for stage in plan.stages] == [12, 14]
    assert [[replica.share for replica in worker] for worker in plan.workers] == [[0.5, 0.5]] * 2
    assert (plan.microbatch_size, plan.schedule.num_microbatches) == (4, 64)
    assert [plan.topology.device(name).kind for name in plan.devices] == ["RTX-3090x8", "RTX-2080x8", "Titan-RTXx8", "RTX-2080x8"]
    assert simulate(plan).makespan_s < RUNS["mit/N4/N4_D2"].simulated().iteration_s  # where messages do not block


def test_slower_links_make_an_iteration_longer() -> None:
    run = RUNS["clariden/OPT-350/N8/N8_D2"]
    assert error(run, 0.25) > error(run, 0.5) > error(run, 1.0)


def test_other_runs_are_judged_with_what_is_fitted_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = json.loads((DATA / "runs.json").read_text())
    (tmp_path / "more.json").write_text(json.dumps([entries[0] | {"sailor_simulated_s": None}]))
    output = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["measured_clusters.py", "--runs", str(tmp_path / "more.json"), "--json", str(output)])
    main()
    (found,) = json.loads(output.read_text())["results"]
    run = Run.of(DATA_OF_SAILOR, entries[0])
    assert found["predicted"]["iteration_s"] == run.simulated(found["rate_share"]).iteration_s
    assert (found["name"], found["sailor_error"]) == (replace(run, sailor_s=None).name, None)


def test_sums_alone_and_messages_alone_show_the_same_share_of_the_rates() -> None:
    runs = [run for run in RUNS.values() if run.cluster == "clariden"]
    assert fitted_share([run for run in runs if len(run.groups) == 1]) == 0.25
    assert fitted_share([run for run in runs if len(run.groups) > 1]) == 0.25


def test_groups_of_a_run_may_have_different_numbers_of_gpus() -> None:
    entry = next(entry for entry in json.loads((DATA / "runs.json").read_text()) if entry["name"] == "mit/N2/N2_D1")
    wider = [[group | {"tensor_parallel": 8} for group in stage] if at else stage for at, stage in enumerate(entry["groups"])]
    run = Run.of(DATA_OF_SAILOR, entry | {"groups": wider})
    plan = run.plan(1.0)
    assert [plan.topology.device(name).kind for name in plan.devices] == ["RTX-3090x2", "Titan-RTXx8"]
    eight = DATA_OF_SAILOR.profile("OPT-350", microbatch_size=2, tensor_parallel=8)
    assert plan.profile.device_kinds["Titan-RTXx8"] == eight.device_kinds["Titan-RTX"]
    assert run.simulated().iteration_s < RUNS["mit/N2/N2_D1"].simulated().iteration_s
