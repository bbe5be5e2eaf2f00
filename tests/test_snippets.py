"""Python snippets of README and docs run as they stand, and print what the page says they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snippets import Snippet, output_behind, snippets

ALONE = [snippet for snippet in snippets("python") if not snippet.trains]


@pytest.mark.parametrize("snippet", ALONE, ids=lambda snippet: snippet.name)
def test_a_snippet_runs_and_prints_what_the_page_says(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet.text, snippet.name, "exec"), {"__name__": "__main__"})
    printed, expected = capsys.readouterr().out, output_behind(snippet)
    if expected is not None:
        assert printed == expected


def test_there_are_snippets_to_run() -> None:
    assert {snippet.page for snippet in ALONE} >= {"README.md", "docs/models.md", "docs/schedules.md"}
