"""The tutorial's commands run one after the other, in an empty folder."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from raypipe.cli import main
from tests.snippets import ROOT, snippets

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

SHORTER = {
    "run.num_updates=20": "run.num_updates=4",
    "run.checkpoint_every=10": "run.checkpoint_every=2",
    "run.num_updates=30": "run.num_updates=6",
}
"""Settings of the tutorial that only take time, and what they are here."""


@pytest.mark.slow
def test_the_commands_of_the_tutorial_work_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one cluster, as where RAY_ADDRESS is set. Runs are shorter than the reader's."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    commands = [line for snippet in snippets("sh") if snippet.page == "docs/tutorial.md" for line in snippet.text.splitlines()]
    assert len(commands) >= 9
    shortened = 0
    for command in commands:
        program, *words = shlex.split(command)
        arguments = [SHORTER.get(word, word) for word in words]
        if words[0] == "train":
            arguments += ["--set", "run.sample_bytes=8"]
        shortened += sum(map(SHORTER.__contains__, words))
        if program == "raypipe":
            assert main(arguments) == 0, f"{command}\n{capsys.readouterr()}"
        else:
            subprocess.run([program, *arguments], check=True)
    assert shortened == len(SHORTER)
    assert Path("both.html").is_file()
    assert list(Path("runs/gpt-python-stdlib/checkpoints").iterdir())
