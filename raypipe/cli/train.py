"""Command `raypipe train`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from contextlib import closing
from typing import TYPE_CHECKING

import click
from rich.console import Console

from raypipe.callbacks.progress import Progress
from raypipe.cli.options import example, json_option
from raypipe.cli.screen import console as stdout_console
from raypipe.cli.screen import prediction_reports
from raypipe.cluster.node_matching import is_gpu
from raypipe.cluster.signals import put_off
from raypipe.config import TrainConfig
from raypipe.show.report import Figure, Report, rows_table
from raypipe.training.run_folder import without_nan

if TYPE_CHECKING:
    from raypipe.training.result import Result


class _Resumable(click.Command):
    """A command with `--resume` and `--resume auto`, before and behind its argument: `--resume CONFIG` is no value of the option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        rest = iter(args)
        for arg in rest:
            if arg == "--":
                joined += [arg, *rest]
            elif arg == "auto" and joined[-1:] == [_RESUME + _NEWEST]:
                joined[-1] = f"{_RESUME}auto"
            else:
                joined.append(_RESUME + _NEWEST if arg == "--resume" else arg)
        return super().parse_args(ctx, joined)


_RESUME = "--resume="
_NEWEST = "newest"


@click.command(
    cls=_Resumable,
    epilog=example(
        "raypipe train examples/gpt_python_stdlib.yaml --set run.num_updates=50",
        "raypipe train examples/gpt_python_stdlib.yaml --set plan=plan.json",
    ),
)
@click.argument("config", type=click.Path())
@click.option(
    "--model", metavar="NAME", help="Train another model than the configured one, with its default options: module:function, or hf:PATH."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replace a value, such as schedule.name=zb-h1. Repeatable.")
@click.option(
    "--resume",
    type=click.Choice([_NEWEST, "auto"]),
    metavar="[auto]",
    help=(
        "Go on from the newest checkpoint of the newest run of this name. With auto go on, or begin if there is nothing to go on from, "
        "or end at once if all is done: the same command for the first start and each later one."
    ),
)
@json_option
def train(config: str, overrides: tuple[str, ...], *, model: str | None, resume: str | None, as_json: bool) -> None:
    """Train what the YAML file CONFIG describes."""
    if model is not None:
        overrides = (f"model.function={json.dumps(model)}", "model.options={}", *overrides)
    loaded = TrainConfig.load(config, overrides=overrides)
    if as_json:  # actors print on stdout, too
        loaded = dataclasses.replace(loaded, cluster=dataclasses.replace(loaded.cluster, log_to_driver=False))
    with closing(Progress()) as progress:
        progress.on_notice("loading torch and Ray")
        with put_off():
            from raypipe.training.trainer import Trainer  # noqa: PLC0415  # loads them only once the configuration is known to be good

        logging.getLogger("ray").setLevel(logging.WARNING)
        shown = [progress] if loaded.run.show_progress else []
        result = Trainer.of(loaded, callbacks=shown).fit(resume="auto" if resume == "auto" else resume is not None)
    if as_json:
        click.echo(json.dumps(without_nan(_report(result).document())))
        return
    _show(result, stdout_console())


def _report(result: Result) -> Report:
    return Report(
        Figure("path", result.path),
        Figure("metrics", result.metrics),
        Figure("losses", result.losses),
        Figure("validation_losses", [list(pair) for pair in result.validation_losses]),
        Figure("checkpoint", result.checkpoint.path),
        Figure("figures", prediction_reports(result.figures, result.plan)),
        Figure("sample", result.sample),
        Figure("stop_reason", result.stop_reason),
        Figure("callback_errors", list(result.callback_errors)),
    )


def _show(result: Result, console: Console) -> None:
    if result.sample:
        console.rule("generated text")
        console.print(result.sample)
        console.rule()
    # The measured memory of a CPU process includes more than the predicted tensors.
    has_gpus = all(is_gpu(result.plan.topology.device(device)) for device in result.plan.devices)
    figures = [figure for figure in result.figures if figure.unit != "bytes" or has_gpus]
    if figures:
        console.print(rows_table(prediction_reports(figures, result.plan), title="predicted against measured"))
    known = {"training loss": result.losses, "validation loss": [loss for _, loss in result.validation_losses]}
    console.print()
    console.print(", ".join(f"{name} {losses[0]:.3f} -> {losses[-1]:.3f}" for name, losses in known.items() if losses))
    if result.stop_reason:
        console.print(f"ended early: {result.stop_reason}", soft_wrap=True)
    for error in result.callback_errors:
        console.print(f"went on without a callback: {error}", soft_wrap=True)
    path = os.path.relpath(result.path)
    path = path if not path.startswith(os.pardir) else result.path
    for names, content in (
        ("timeline.html", "the timeline, predicted and measured"),
        ("metrics.jsonl", "loss, gradient norm, speed per update"),
        (os.path.relpath(result.checkpoint.path, result.path), "the checkpoint"),
    ):
        console.print(f"{path}/{names}  {content}", soft_wrap=True)
    console.print(f"next: `raypipe show {path}/trace.json` says why devices waited", soft_wrap=True)
