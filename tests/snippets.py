"""The snippets of README and docs, as a reader would paste them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page.

    Attributes:
        page: Name of the page.
        line: Number of its first line.
        language: What stands behind the fence.
        text: The block.
        note: Comment right above it, such as why it cannot be run alone.
    """

    page: str
    line: int
    language: str
    text: str
    note: str = ""

    @property
    def name(self) -> str:
        """Name of the test: page and line."""
        return f"{self.page}:{self.line}"

    @property
    def trains(self) -> bool:
        """Whether it starts a run on Ray."""
        return ".fit()" in self.text


def snippets(language: str) -> list[Snippet]:
    """Return all blocks of a language, but for those whose note says `fragment`."""
    return [
        Snippet(
            str(page.relative_to(ROOT)),
            page.read_text()[: block.start("text")].count("\n") + 1,
            language,
            block["text"],
            block["note"] or "",
        )
        for page in PAGES
        for block in _BLOCK.finditer(page.read_text())
        if block["language"] == language and not (block["note"] or "").startswith("fragment")
    ]


def output_behind(snippet: Snippet) -> str | None:
    """Return the `text` block that follows a snippet directly: what it prints."""
    page = (ROOT / snippet.page).read_text()
    end = page.index(snippet.text) + len(snippet.text)
    match = re.match(r"```\n\n```text\n(.*?)^```$", page[end:], re.MULTILINE | re.DOTALL)
    return match[1] if match else None
