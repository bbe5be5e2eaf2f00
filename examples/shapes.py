"""Makes the images of `cnn.yaml`: circles, squares, triangles and crosses of random place, size and shade, with noise.

python examples/shapes.py data/shapes.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raypipe.data.fields import Rows, write_rows

NAMES = ("circle", "square", "triangle", "cross")
NUM_PIXELS = 32


def shapes(num_images: int, *, seed: int = 0) -> Rows:
    """Return `pixels` (uint8 [32, 32]) and `label` (its number in `NAMES`); a tenth of the images are for validation."""
    random = np.random.default_rng(seed)
    labels = random.integers(len(NAMES), size=num_images)
    images = np.stack([_drawn(NAMES[label], random) for label in labels])
    splits = np.where(np.arange(num_images) % 10 == 0, "validation", "train")
    return Rows({"pixels": images, "label": labels}, splits.tolist(), labels={"label": list(NAMES)})


def _drawn(name: str, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    radius = random.uniform(5, 11)
    x, y = (random.uniform(radius, NUM_PIXELS - radius) for _ in range(2))
    columns, rows = np.meshgrid(np.arange(NUM_PIXELS) - x, np.arange(NUM_PIXELS) - y)
    inside = {
        "circle": columns**2 + rows**2 < radius**2,
        "square": np.maximum(abs(columns), abs(rows)) < radius,
        "triangle": (abs(rows) < radius) & (2 * abs(columns) < radius + rows),
        "cross": (np.minimum(abs(columns), abs(rows)) < radius / 3) & (np.maximum(abs(columns), abs(rows)) < radius),
    }[name]
    light, dark = random.uniform(120, 250), random.uniform(0, 100)
    image = np.where(inside, light, dark) + random.normal(0, 20, size=(NUM_PIXELS, NUM_PIXELS))
    return image.clip(0, 255).astype(np.uint8)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write images of shapes for examples/cnn.yaml.")
    parser.add_argument("output")
    parser.add_argument("--num-images", type=int, default=20_000)
    arguments = parser.parse_args()
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    write_rows(Path(arguments.output), shapes(arguments.num_images))
    print(f"{arguments.output}: {arguments.num_images} images of {', '.join(NAMES)}")


if __name__ == "__main__":
    main()
