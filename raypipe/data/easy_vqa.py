"""Questions about images, from the package `easy-vqa` (MIT licence): 5,000 images of a shape, 48,000 questions, 13 answers."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import numpy.typing as npt

from raypipe.data.fields import TEST, Repeated, Rows
from raypipe.data.samples import split_of
from raypipe.errors import InputError


def easy_vqa_rows(validation_fraction: float) -> Rows:
    """Return `image` (uint8 [64, 64, 3]), `question` (words as uint8, padded with 0) and `answer` (int64) of each question.

    The package's test questions are the split `test`. Of its training images, some go to `validation` with all of their questions.

    Raises:
        InputError: The package is not installed.
    """
    try:
        import easy_vqa  # noqa: PLC0415  # an extra
        from PIL import Image  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise InputError(f"easy-vqa needs the packages easy-vqa and pillow: pip install 'raypipe[branches]' ({error})") from error
    answers: list[str] = easy_vqa.get_answers()
    parts = {
        "train": (easy_vqa.get_train_questions(), easy_vqa.get_train_image_paths()),
        TEST: (easy_vqa.get_test_questions(), easy_vqa.get_test_image_paths()),
    }
    names, splits, image_of, questions, answered = [], [], [], [], []
    images: list[npt.NDArray[np.uint8]] = []
    for part, ((texts, replies, image_ids), paths) in parts.items():
        places = {image_id: len(images) + number for number, image_id in enumerate(sorted(paths))}
        for image_id in places:
            with Image.open(paths[image_id]) as image:
                images.append(np.asarray(image.convert("RGB")))
        for number, (text, reply, image_id) in enumerate(zip(texts, replies, image_ids, strict=True)):
            names.append(f"{part}/{number}")
            splits.append(TEST if part == TEST else split_of(f"image {image_id}", validation_fraction).value)
            image_of.append(places[image_id])
            questions.append(text.lower().replace("?", "").split())
            answered.append(answers.index(reply))
    words = ["", *sorted({word for question in questions for word in question})]
    tokens = np.zeros((len(questions), max(map(len, questions))), dtype=np.uint8)
    for row, question in enumerate(questions):
        tokens[row, : len(question)] = [words.index(word) for word in question]
    return Rows(
        fields={"image": Repeated(np.stack(images), np.array(image_of)), "question": tokens, "answer": np.array(answered)},
        names=names,
        splits=splits,
        labels={"question": words, "answer": answers},
        source=f"easy-vqa {version('easy-vqa')}",
        license="MIT, Copyright (c) 2019 Victor Zhou, https://github.com/vzhou842/easy-VQA",
    )
