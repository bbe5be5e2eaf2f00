"""The tutorial's commands run one after the other, in an empty folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.snippets import ROOT, snippets

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_the_commands_of_the_tutorial_work_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [line for snippet in snippets("sh") if snippet.page == "docs/tutorial.md" for line in snippet.text.splitlines()]
    assert len(commands) >= 9
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    for command in commands:
        program, *arguments = shlex.split(command)
        words = [sys.executable, "-m", "raypipe", *arguments] if program == "raypipe" else [program, *arguments]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "both.html").is_file()
    assert (tmp_path / "runs" / "gpt-python-stdlib" / "checkpoints").is_dir()
