"""Trains a tokenizer of one's own: byte-level byte pair encoding (Sennrich et al. 2016, arXiv 1508.07909) on the files of a folder.

python examples/tokenizer.py docs --vocabulary-size 4096 -o data/tokenizer.json
raypipe data prepare docs --tokenizer data/tokenizer.json -o data/docs.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

END = "<|endoftext|>"
SUFFIXES = {".txt", ".md", ".py", ".rst"}


def main() -> None:
    """Train on all texts of a folder, and write the tokenizer."""
    parser = argparse.ArgumentParser(description="Train a tokenizer on the texts of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocabulary-size", type=int, default=4096)
    parser.add_argument("-o", "--output", required=True, type=Path)
    arguments = parser.parse_args()
    try:
        from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415  # an extra
    except ImportError:
        parser.error("it needs the package tokenizers: pip install 'raypipe[tokenizers]'")
    files = sorted(str(path) for path in arguments.folder.rglob("*") if path.suffix in SUFFIXES)
    if not files:
        parser.error(f"there is no text in {arguments.folder}: no file ends with {', '.join(sorted(SUFFIXES))}")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(files, vocab_size=arguments.vocabulary_size, special_tokens=[END], show_progress=False)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.output))
    print(f"{arguments.output}: {tokenizer.get_vocab_size()} tokens from {len(files)} files")


if __name__ == "__main__":
    main()
