"""Configurations with comments, from which a run begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, suggestion
from raypipe.model import Model
from raypipe.user_code import make_model

_MOST_DEVICES = 2
_STDLIB = "data/python-stdlib.parquet"
_TOKENS = {"tokens", "targets"}
HUGGING_FACE = "hf:"


@dataclass(frozen=True)
class Template:
    """A model and what it trains on.

    Attributes:
        name: Name of the run, and of the file.
        function: `model.function`.
        about: What it is, in a line.
        data: Its file of data.
        command: Command that makes the file; `{data}` stands for it.
        options: Keyword arguments of the function.
        microbatch_size: Rows of a microbatch.
        sequence_length: Tokens of a row; `None` where rows are not tokens.
        num_layers: Layers that a device can hold; a run has no more devices.
        schedule: Name of its schedule.
        note: What the data is to be, where no command makes it.
    """

    name: str
    function: str
    about: str
    data: str = _STDLIB
    command: str = "raypipe data prepare python-stdlib -o {data}"
    options: Mapping[str, Any] = field(default_factory=dict)
    microbatch_size: int = 4
    sequence_length: int | None = 128
    num_layers: int = _MOST_DEVICES
    schedule: str = "1f1b"
    note: str = ""

    def prepare(self, data: str | None) -> list[str]:
        """Return the commands that make the data, if it is not given."""
        return [self.command.format(data=self.data)] if data is None and self.command else []

    def text(self, path: str, *, data: str | None, devices: int | None) -> str:
        """Return the YAML file.

        Raises:
            ConfigError: There are more devices than layers.
        """
        num_devices = devices or min(_MOST_DEVICES, self.num_layers)
        if num_devices > self.num_layers:
            raise ConfigError(f"--devices {num_devices}: the model has {self.num_layers} layers, at most one device for each")
        lines = [f"# {self.about}", *(f"#   {line}" for line in (*self.prepare(data), f"raypipe train {path}"))]
        lines += [f"# {self.note}"] if self.note and data is None else []
        length = [] if self.sequence_length is None else [f"  sequence_length: {self.sequence_length}  # tokens of a row"]
        options = f"{json.dumps(dict(self.options))}  # keyword arguments of the function" if self.options else "{}"
        lines += f"""\
# All settings: docs/configuration.md. `--set section.key=value` replaces one for a run.
format: raypipe.train/1
model:
  function: {json.dumps(self.function)}
  options: {options}
  precision: float32  # or bf16-mixed, bf16
data:
  path: {json.dumps(data or self.data)}
{chr(10).join([*length, "  num_validation_microbatches: 4  # of each evaluation; 0 for none"])}
schedule:
  name: {self.schedule}  # `raypipe schedules` lists them; auto lets raypipe choose
  num_microbatches: 8  # of an update; more of them make the bubble smaller
  microbatch_size: {self.microbatch_size}  # rows
  updates_per_window: 10  # evaluations and checkpoints come between windows
optimizer:
  name: adamw
  learning_rate: 1.0e-3
  warmup_updates: 20
scaling:
  num_devices: {num_devices}  # stages on CPU slots; on GPUs with use_gpu: true
  use_gpu: false
run:
  name: {json.dumps(self.name)}  # the folder of the run in storage_path
  storage_path: runs  # a folder that all nodes share, or a URI such as s3://bucket/runs
  num_updates: 100
  evaluate_every: 20
  checkpoint_every_s: 600
  keep_best_by: validation_loss  # beside the newest checkpoints
# callbacks:
#   - tensorboard  # or wandb, mlflow, csv, parquet
#   - {{name: early-stopping, options: {{patience: 3}}}}""".splitlines()
        text = "\n".join(lines) + "\n"
        TrainConfig.from_text(text, path=path)  # what is written can be read
        return text


_GLYPHS = {"data": "data/glyphs.parquet", "command": "raypipe data prepare glyphs -o {data}", "sequence_length": None}
_VQA = {"data": "data/easy-vqa.parquet", "command": "raypipe data prepare easy-vqa -o {data}", "sequence_length": None}
_GPT = {"num_layers": 4, "d_model": 256, "num_heads": 4, "sequence_length": 128}

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template("gpt", "raypipe.models.gpt:gpt", "A byte-level GPT of 3.3 M parameters.", options=_GPT, num_layers=6),
        Template(
            "ngram-gpt",
            "raypipe.models.ngram_gpt:ngram_gpt",
            "A byte-level GPT with large tables of n-grams, of which an update reads few rows.",
            num_layers=6,
        ),
        Template(
            "cnn",
            "raypipe.models.cnn:cnn",
            "A residual network that tells images apart.",
            data="data/images.parquet",
            command="",
            options={"num_classes": 10},
            microbatch_size=16,
            sequence_length=None,
            num_layers=8,
            note="The file has the fields pixels (uint8 [H, W, 3]) and label: see raypipe.data.fields.write_rows, examples/shapes.py.",
        ),
        Template(
            "clip",
            "raypipe.models.clip:clip",
            "Images and texts that learn which belongs to which.",
            microbatch_size=64,
            schedule="branch-aware",
            **_GLYPHS,  # type: ignore[arg-type]
        ),
        Template(
            "vqa",
            "raypipe.models.vqa:vqa",
            "Answers to questions about images.",
            microbatch_size=32,
            schedule="branch-aware",
            **_VQA,  # type: ignore[arg-type]
        ),
    )
}
"""The bundled models by name."""


def template_of(model: str, options: Mapping[str, Any]) -> Template:
    """Return the template of a bundled model, a function or a model of Hugging Face.

    Raises:
        ConfigError: There is no such model, or it cannot be built with the options.
    """
    if model in TEMPLATES:
        return _with_options(TEMPLATES[model], options)
    if model.startswith(HUGGING_FACE):
        return _hugging_face(model, options)
    if ":" not in model:
        raise ConfigError(
            f"no bundled model is called {model!r}{suggestion(model, TEMPLATES)}; choose from {', '.join(TEMPLATES)}, or give "
            "module:function, path/to/file.py:function, or hf:PATH"
        )
    return _of_function(model, make_model(model, options), options)


def _with_options(template: Template, options: Mapping[str, Any]) -> Template:
    if not options:
        return template
    both = {**template.options, **options}
    return replace(template, options=both, num_layers=len(make_model(template.function, both).layers))


def _hugging_face(model: str, options: Mapping[str, Any]) -> Template:
    path = model.removeprefix(HUGGING_FACE).rstrip("/")
    return Template(
        PurePath(path).name or "model",
        model,
        f"{PurePath(path).name} of Hugging Face, trained further.",
        command=f"raypipe data prepare python-stdlib --tokenizer {path}/tokenizer.json -o {{data}}",
        data=f"data/python-stdlib-{PurePath(path).name}.parquet",
        options=options,
    )


def _of_function(model: str, built: Model, options: Mapping[str, Any]) -> Template:
    fields = {name for layer in built.layers for name in layer.batch}
    name = model.rpartition(":")[2].replace("_", "-")
    about = f"{model}: {len(built.layers)} layers."
    schedule = "branch-aware" if len(built.branches()) > 1 else "1f1b"
    if fields and fields <= _TOKENS:
        return Template(name, model, about, options=options, num_layers=len(built.layers), schedule=schedule)
    note = (
        f"The file has the fields {', '.join(sorted(fields))}, and those that the loss reads: write it with raypipe.data.fields.write_rows."
    )
    return Template(
        name,
        model,
        about,
        data="data/rows.parquet",
        command="",
        options=options,
        num_layers=len(built.layers),
        sequence_length=None,
        schedule=schedule,
        note=note,
    )
