"""A model of Hugging Face in a pipeline, beside the same model in a plain loop: losses and tokens per second.

    python benchmarks/huggingface.py data/smollm2 --data data/python-stdlib-smollm2.parquet [--updates 50] [--only pipeline] [--json FILE]
    python benchmarks/huggingface.py data/smollm2 --data data/python-stdlib-smollm2.parquet --layers

The plain loop is transformers' own model in this process, with one and with two threads, gradients accumulated over the same
microbatches, and AdamW with the same settings. With `--only`, one of them is measured, and what FILE has of the others is kept. With
`--layers`, layers one after another in this process are measured beside the whole model: what it costs that each layer makes masks and
rotary embeddings for itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rounds import write_json
from transformers import AutoModelForCausalLM

from raypipe.actors.execution.batches import FileSource
from raypipe.actors.stage.layers import build_layer
from raypipe.config import DataConfig, FailureConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.model import Batch
from raypipe.training.trainer import Trainer
from raypipe.user_code import make_model

RATE, DECAY = 1e-4, 0.01
NUM_MICROBATCHES, NUM_ROWS, LENGTH = 4, 1, 64
WHOLE = (0.0, 1.0)


def source(data: str) -> FileSource:
    """Return the rows that both train on."""
    return FileSource(data, sequence_length=LENGTH, seed=0, microbatch_size=NUM_ROWS)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return transformers' own loss."""
    loss: torch.Tensor = model(input_ids=batch["tokens"], labels=batch["targets"], shift_labels=batch["targets"], use_cache=False).loss
    return loss


def plain_loop(folder: str, data: str, num_updates: int, *, num_threads: int) -> tuple[list[float], float]:
    """Return losses, and the median of the seconds of an update."""
    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    rows = source(data)("train")
    losses, seconds = [], []
    for update in range(num_updates):
        began_s = time.perf_counter()
        total = 0.0
        for number in range(NUM_MICROBATCHES):
            loss = loss_of(model, rows.batch(update * NUM_MICROBATCHES + number, WHOLE)) / NUM_MICROBATCHES
            torch.autograd.backward(loss)
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        seconds.append(time.perf_counter() - began_s)
    return losses, statistics.median(seconds)


def pipeline(folder: str, data: str, num_updates: int, num_devices: int) -> tuple[list[float], float]:
    """Return losses, and the seconds of an update as the run reports them."""
    result = Trainer(
        f"hf:{folder}",
        data_config=DataConfig(path=data, sequence_length=LENGTH, num_validation_microbatches=0),
        schedule_config=ScheduleConfig(num_microbatches=NUM_MICROBATCHES, microbatch_size=NUM_ROWS, updates_per_window=5),
        optimizer_config=OptimizerConfig(learning_rate=RATE, final_learning_rate=RATE, warmup_updates=0, weight_decay=DECAY),
        scaling_config=ScalingConfig(num_devices=num_devices),
        run_config=RunConfig(name="hf-benchmark", num_updates=num_updates),
        failure_config=FailureConfig(spare_processes=False),  # loading one takes a core for seconds
    ).fit()
    return list(result.losses), result.metrics["update_s"]


def layers_beside_whole(folder: str, data: str) -> None:
    """Print seconds of forward and backward of the whole model, and of its layers one after another."""
    torch.set_num_threads(1)
    batch = source(data)("train").batch(0, WHOLE)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    described = make_model(f"hf:{folder}", {})
    began_s = time.perf_counter()
    layers = [build_layer(layer, index=index, seed=0).train() for index, layer in enumerate(described.layers)]
    print(f"{len(layers)} layers built in {time.perf_counter() - began_s:.1f} s")

    def by_layers() -> torch.Tensor:
        hidden: tuple[torch.Tensor, ...] = ()
        for layer in layers:
            hidden = (layer(*hidden, tokens=batch["tokens"]),)
        return described.loss(hidden[0], batch)

    cases = {"whole": lambda: loss_of(whole, batch), "by layers": by_layers}
    figures = _seconds(cases)
    for name, (forward_s, both_s) in figures.items():
        print(f"{name:10} forward {forward_s:.3f} s, forward and backward {both_s:.3f} s of CPU time")
    print(f"by layers / whole: {figures['by layers'][1] / figures['whole'][1]:.3f}")


def _seconds(cases: Mapping[str, Callable[[], torch.Tensor]], rounds: int = 7) -> dict[str, tuple[float, float]]:
    # CPU time of one thread, in turns: other programs may use the cores.
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, loss in cases.items():
            began_s = time.process_time()
            value = loss()
            forward_s = time.process_time() - began_s
            torch.autograd.backward(value)
            found[name].append((forward_s, time.process_time() - began_s))
    medians = {name: [statistics.median(seconds) for seconds in zip(*times, strict=True)] for name, times in found.items()}
    return {name: (forward_s, both_s) for name, (forward_s, both_s) in medians.items()}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A model of Hugging Face in a pipeline, beside a plain loop.")
    parser.add_argument("folder", help="folder of the model")
    parser.add_argument("--data", required=True, help="token file of its tokenizer")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--only", choices=("plain-1", "plain-2", "pipeline"), help="measure this and nothing else")
    parser.add_argument("--layers", action="store_true", help="measure layers beside the whole model, and nothing else")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    folder, data, num_updates = arguments.folder, arguments.data, arguments.updates
    if arguments.layers:
        layers_beside_whole(folder, data)
        return
    cases: dict[str, Callable[[], tuple[list[float], float]]] = {
        "plain-1": lambda: plain_loop(folder, data, num_updates, num_threads=1),
        "plain-2": lambda: plain_loop(folder, data, num_updates, num_threads=2),
        "pipeline": lambda: pipeline(folder, data, num_updates, arguments.devices),
    }
    results: dict[str, Any] = {}
    if arguments.only is not None and arguments.json is not None and Path(arguments.json).exists():
        results = json.loads(Path(arguments.json).read_text(encoding="utf-8"))["results"]
    for name, measure in cases.items():
        if arguments.only in {None, name}:
            losses, update_s = measure()
            results[name] = {"update_s": update_s, "tokens_per_s": NUM_MICROBATCHES * NUM_ROWS * LENGTH / update_s, "losses": losses}
    write_json(arguments.json, results)
    _print_beside(results)


def _print_beside(results: Mapping[str, Any]) -> None:
    for name, found in results.items():
        losses = found["losses"]
        line = f"{name:8} {found['tokens_per_s']:.0f} tokens/s, loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        plain = results.get("plain-2")
        if plain is not None and name != "plain-2":
            line += f", at most {max(abs(a - b) for a, b in zip(plain['losses'], losses, strict=True)):.1e} beside plain-2"
        print(line)


if __name__ == "__main__":
    main()
