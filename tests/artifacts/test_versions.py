"""Which versions a result depends on."""

from __future__ import annotations

from importlib import metadata

import pytest

from raypipe.artifacts.versions import versions


def test_raypipe_has_a_version_also_where_it_runs_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    assert versions()["raypipe"] == metadata.version("raypipe")
    monkeypatch.setattr(metadata, "version", version)
    assert versions()["raypipe"] == "not installed"
