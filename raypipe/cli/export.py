"""Command `raypipe export`."""

from __future__ import annotations

import click

from raypipe.cli.options import COUNT, example, json_option
from raypipe.cli.screen import print_json
from raypipe.errors import visible


@click.command(epilog=example("raypipe export runs/run --to smollm2-tuned", "raypipe export runs/run --to adapters --adapters adapters"))
@click.argument("run", metavar="RUN_FOLDER")
@click.option("--to", required=True, type=click.Path(), metavar="FOLDER", help="Folder to make.")
@click.option("--checkpoint", type=COUNT, metavar="N", help="Export the checkpoint after update N.  [default: the newest]")
@click.option("--dtype", help="Type of the weights, such as bfloat16.  [default: that in which they were trained]")
@click.option("--max-shard-size", default="5GB", help="Largest size of one file of weights.")
@click.option(
    "--adapters",
    type=click.Choice(["merged", "adapters"]),
    default="merged",
    help="Of a run with adapters: one model with the adapters in its weights, or the adapters alone.",
)
@json_option
def export(run: str, *, to: str, checkpoint: int | None, dtype: str | None, max_shard_size: str, adapters: str, as_json: bool) -> None:
    """Write the trained model of Hugging Face of a run into a folder that transformers' from_pretrained reads.

    RUN_FOLDER is a folder or a URI that `raypipe train` wrote, of a model named hf:PATH.
    """
    # This loads torch, which --help does without.
    from raypipe.hf.export import export as write  # noqa: PLC0415

    folder = write(run, to, checkpoint=checkpoint, dtype=dtype, max_shard_size=max_shard_size, adapters=adapters)
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    if as_json:
        print_json({"folder": str(folder), "files": files})
    else:
        click.echo(visible(f"{folder}: {', '.join(files)}, {sum(files.values())} bytes"))
