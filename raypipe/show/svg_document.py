"""SVG files, and text that cannot break them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

import svg

WIDTH = 1200
MARGIN = 16

# What XML 1.0 cannot hold, not even escaped.
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STYLE = (
    "text{font:12px 'DejaVu Sans',Verdana,sans-serif;fill:#222}.h{font-size:14px;font-weight:bold}.r{text-anchor:end}"
    ".m{text-anchor:middle}.g{fill:#666;font-size:11px}"
)


def place(pixels: float) -> float:
    """Round to a tenth of a pixel."""
    return round(pixels, 1)


def escape(text: str) -> str:
    """Escape text that stands between tags."""
    return html.escape(_NO_XML.sub("?", text), quote=False)


def safe_text(text: str, x: float, y: float, *classes: str) -> svg.Text:
    """Return escaped text."""
    return svg.Text(x=place(x), y=place(y), class_=list(classes) or None, text=escape(text))


def document(elements: Sequence[svg.Element], *, height: float, style: str) -> str:
    """Return an SVG file; `height` is in pixels, `style` in CSS."""
    sheet = svg.SVG(
        width=WIDTH,
        height=round(height),
        viewBox=svg.ViewBoxSpec(0, 0, WIDTH, round(height)),
        elements=[svg.Style(text=_STYLE + style), svg.Rect(width=WIDTH, height=round(height), fill="#fff"), *elements],
    )
    return f"{sheet}\n"
