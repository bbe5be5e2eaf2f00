"""Pairs of a rendered glyph and its Unicode name, from the twelve DejaVu faces that matplotlib ships."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from raypipe.data.fields import TEST, Rows
from raypipe.data.samples import Split
from raypipe.errors import InputError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

NUM_PIXELS = 32
NAME_BYTES = 80
"""The longest name has 73."""

_SPLITS = {"DejaVuSerif-Italic": Split.VALIDATION.value, "DejaVuSerif-BoldItalic": TEST}
"""The faces that no glyph to train with comes from; no other face is a serif in italics."""
_STYLES = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
}
_SIZES = (22, 18, 14, 10, 7)  # pixels of an em; the largest at which the glyph fits
_BASELINE = 24


def glyph_rows() -> Rows:
    """Return `glyph` (uint8 [32, 32], grey) and `name` (its ASCII bytes as uint8 [80], padded with 0) of each glyph of each face.

    One face is the split `validation` and one `test`; the other ten are `train`. Characters without a name or ink are left out.

    Raises:
        InputError: matplotlib or pillow is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415  # an extra
        from matplotlib.ft2font import FT2Font  # noqa: PLC0415  # an extra
        from PIL import ImageFont  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise InputError(f"glyphs needs the packages matplotlib and pillow: pip install 'raypipe[branches]' ({error})") from error
    folder = Path(mpl.get_data_path(), "fonts", "ttf")
    names, splits, glyphs, texts = [], [], [], []
    for face in (family + style for family, styles in _STYLES.items() for style in styles):
        path = str(folder / f"{face}.ttf")
        fonts = [ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC) for size in _SIZES]
        for character, name in _named(FT2Font(path).get_charmap()):
            glyph = _rendered(character, fonts)
            if glyph.any():
                names.append(f"{face} U+{ord(character):04X}")
                splits.append(_SPLITS.get(face, Split.TRAIN.value))
                glyphs.append(glyph)
                texts.append(name.encode().ljust(NAME_BYTES, b"\0"))
    return Rows(
        fields={"glyph": np.stack(glyphs), "name": np.frombuffer(b"".join(texts), dtype=np.uint8).reshape(-1, NAME_BYTES)},
        names=names,
        splits=splits,
        source=f"DejaVu faces of matplotlib {version('matplotlib')}, names of Unicode {unicodedata.unidata_version}",
        license="DejaVu Fonts License, https://dejavu-fonts.github.io/License.html; Unicode License, https://www.unicode.org/license.txt",
    )


def _named(codes: Iterable[int]) -> Iterator[tuple[str, str]]:
    for code in sorted(codes):
        if name := unicodedata.name(chr(code), ""):
            yield chr(code), name


def _rendered(character: str, fonts: list[FreeTypeFont]) -> npt.NDArray[np.uint8]:
    """Return a glyph on its baseline, in the middle of the image; smaller if it would not fit."""
    from PIL import Image, ImageDraw  # noqa: PLC0415  # an extra

    for font in fonts:
        left, top, right, bottom = font.getbbox(character, anchor="ls")
        if right - left <= NUM_PIXELS and top >= -_BASELINE and bottom <= NUM_PIXELS - _BASELINE:
            break
    image = Image.new("L", (NUM_PIXELS, NUM_PIXELS))
    ImageDraw.Draw(image).text(((NUM_PIXELS - round(left + right)) // 2, _BASELINE), character, fill=255, font=font, anchor="ls")
    return np.asarray(image)
