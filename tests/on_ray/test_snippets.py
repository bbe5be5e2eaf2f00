"""What README and docs tell a reader to train, trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import slow_unless
from tests.snippets import Snippet, snippets

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]


TRAINING = [snippet for snippet in snippets("python") if snippet.trains]


@pytest.mark.parametrize("snippet", slow_unless(TRAINING[:1], TRAINING), ids=lambda snippet: snippet.name)
def test_a_snippet_trains(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(snippet.text)
    exec(compile(snippet.text, snippet.name, "exec"), {"__name__": "__main__"})
    assert list(tmp_path.glob("runs/*/metrics.jsonl"))
