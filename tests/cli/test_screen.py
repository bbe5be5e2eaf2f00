"""What tables of a run call its devices."""

from __future__ import annotations

from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.plan import make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cli.screen import prediction_reports
from raypipe.planning.balance import balanced_cut
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest


def test_figures_carry_the_words_for_their_devices() -> None:
    profile = ModelProfile.uniform(8)
    plan = make_plan(
        name="test",
        planner="balanced",
        cut=balanced_cut(profile, 2),
        schedule=build("1f1b", ScheduleRequest(2, 4)),
        profile=profile,
        topology=ClusterTopology.uniform(2),
        devices=("device0", "device1"),
        microbatch_size=1,
    )
    figures = [ComparedFigure(name, "ratio", 0.5, 0.5, 0.0) for name in ("bubble", "bubble of device device1")]
    reports = prediction_reports(figures, plan)
    assert [report.cells()["figure"] for report in reports] == ["bubble", "bubble of stage 1"]
    assert [report.document()["name"] for report in reports] == [figure.name for figure in figures]
