"""Command `raypipe init`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from raypipe.artifacts.files import write_text
from raypipe.artifacts.syntax import yaml_tree
from raypipe.cli.options import example, json_option
from raypipe.cli.screen import print_json
from raypipe.errors import ConfigError

if TYPE_CHECKING:
    from raypipe.cli.templates import Template


@click.command(
    epilog=example("raypipe init gpt -o gpt.yaml", "raypipe init my_model.py:my_model --data rows.parquet -o mine.yaml", "raypipe init")
)
@click.argument("model", required=False)
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="File to write (.yaml).  [default: the model's name]")
@click.option("--data", metavar="FILE", help="Parquet file to train on.  [default: that of the command in the configuration's comment]")
@click.option(
    "--devices", type=click.IntRange(1, 10_000), default=None, help="Number of devices.  [default: 2, or as many as the model has layers]"
)
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="Keyword argument of the model's function. Repeatable.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@json_option
def init(
    model: str | None, *, output: str | None, data: str | None, devices: int | None, options: tuple[str, ...], force: bool, as_json: bool
) -> None:
    """Write a configuration for MODEL with comments, ready for `raypipe train`.

    MODEL is the name of a bundled model, module:function, path/to/file.py:function, or hf:PATH for a model of Hugging Face. Without it,
    the bundled models are listed.
    """
    from raypipe.cli.templates import TEMPLATES, template_of  # noqa: PLC0415

    if model is None:
        _list(TEMPLATES, as_json=as_json)
        return
    template = template_of(model, _read(options))
    path = output or f"{template.name}.yaml"
    if os.path.exists(path) and not force:
        raise ConfigError(f"{path} exists; give another name with -o, or --force to replace it")
    write_text(path, template.text(path, data=data, devices=devices))
    if as_json:
        print_json({"file": path, "model": template.function, "prepare": template.prepare(data)})
        return
    click.echo(f"written to {path}; next:")
    for line in (*template.prepare(data), f"raypipe train {path}"):
        click.echo(f"    {line}")


def _read(options: tuple[str, ...]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option {option!r}: expected KEY=VALUE, such as num_layers=8")
        tree = yaml_tree(f"value: {value}", path=f"--option {key}")
        read[key] = tree["value"] if isinstance(tree, dict) else tree
    return read


def _list(templates: dict[str, Template], *, as_json: bool) -> None:
    if as_json:
        print_json({name: template.about for name, template in templates.items()})
        return
    for name, template in templates.items():
        click.echo(f"{name:10} {template.about}")
    click.echo("\nalso: module:function, path/to/file.py:function, hf:PATH")
