"""Conversations on Python's standard library, from its docstrings, to fine-tune a chat model with.

python examples/finetune_smollm2.py data/smollm2          # unpacks the model
raypipe train examples/chats.yaml
python examples/chats.py runs/chats "What does shutil.copytree do?"
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator

import raypipe.hf
from raypipe.data.collation import Pad

MODULES = ("bisect", "collections", "csv", "functools", "heapq", "itertools", "json", "os", "os.path", "pathlib", "random", "re", "shutil")
EVERY = 10
"""One of so many functions is held out."""

collate = Pad(96, mask="attention_mask", cut=True)


def functions() -> Iterator[tuple[str, str]]:
    """Yield the name and the first sentence of the docstring of each public function and class."""
    for module in MODULES:
        for name, member in sorted(vars(importlib.import_module(module)).items()):
            text = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            if text:
                yield f"{module}.{name}", " ".join(text.split("\n\n")[0].split())


def conversations(*, held_out: bool) -> list[list[dict[str, str]]]:
    """Return questions and answers, each a list of messages."""
    return [
        [{"role": "user", "content": f"What does {name} do?"}, {"role": "assistant", "content": answer}]
        for number, (name, answer) in enumerate(functions())
        if (number % EVERY == 0) == held_out
    ]


def train(model: str) -> raypipe.hf.Chats:
    """Return the rows to train on (`data.train`)."""
    return raypipe.hf.Chats(conversations(held_out=False), model)


def evaluate(model: str) -> raypipe.hf.Chats:
    """Return the rows that are held out (`data.eval`)."""
    return raypipe.hf.Chats(conversations(held_out=True), model)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Ask a chat model that was trained with examples/chats.yaml.")
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("question")
    arguments = parser.parse_args()
    print(raypipe.hf.generate(arguments.run, [{"role": "user", "content": arguments.question}], max_new_tokens=60))


if __name__ == "__main__":
    main()
