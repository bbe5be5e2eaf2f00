"""What a run's record keeps where the disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.artifacts.files import write_text
from raypipe.callbacks.group import CallbackGroup
from raypipe.config import DataConfig, ModelConfig, TrainConfig
from raypipe.errors import FormatError
from raypipe.training.record import RunRecord
from raypipe.training.run_folder import RunFolder


@pytest.mark.parametrize("kind", [OSError, FormatError])
def test_records_that_cannot_be_written_are_kept_in_order_until_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    told: list[str] = []
    callbacks = CallbackGroup([])
    monkeypatch.setattr(callbacks, "notice", told.append)
    folder = RunFolder.create(str(tmp_path), "gpt")
    config = TrainConfig(model=ModelConfig(function="models:gpt"), data=DataConfig(path=""))
    record = RunRecord(config, folder, callbacks, tokens_per_row=None, first_update=0)
    path = folder.file("missing") / "plan.json"
    record._write(lambda: write_text(path, "plan") if kind is FormatError else path.write_text("plan"))
    record.add_decision({"update": 1})
    assert len(told) == 1
    assert str(path.parent) in told[0]
    assert not folder.file("adaptation.jsonl").exists()
    path.parent.mkdir()
    record.add_decision({"update": 2})
    assert path.read_text() == "plan"
    assert folder.file("adaptation.jsonl").read_text().splitlines() == ['{"update": 1}', '{"update": 2}']
    assert len(told) == 1
