"""Command `raypipe data`."""

from __future__ import annotations

import dataclasses

import click

from raypipe.cli.options import check_not_input, example, json_option
from raypipe.cli.screen import print_json
from raypipe.errors import visible


@click.group(invoke_without_command=True)
@click.pass_context
def data(context: click.Context) -> None:
    """Prepare data to train on."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@data.command(
    epilog=example(
        "raypipe data prepare python-stdlib -o tokens.parquet",
        "raypipe data prepare texts/ --tokenizer tokenizer.json -o t.parquet",
        "raypipe data prepare glyphs -o glyphs.parquet",
    )
)
@click.argument("source")
@click.option("-o", "--output", required=True, type=click.Path(), metavar="FILE", help="File to write (.parquet).")
@click.option(
    "--validation-fraction", type=float, help="Share of the documents, or of easy-vqa's images, to keep for validation.  [default: 0.05]"
)
@click.option(
    "--tokenizer", type=click.Path(), metavar="FILE", help="Tokenizer in the tokenizer.json format.  [default: each byte is a token]"
)
@click.option("--separator", metavar="TOKEN", help="Token of the tokenizer that ends each document.  [default: its end-of-text token]")
@json_option
def prepare(
    source: str, *, output: str, validation_fraction: float | None, tokenizer: str | None, separator: str | None, as_json: bool
) -> None:
    """Turn text into tokens (one a byte, or those of a tokenizer), or images and text into named fields.

    SOURCE is a text file, a folder of them, python-stdlib for the source of Python's standard library, easy-vqa for questions about
    images, or glyphs for rendered characters and their names.
    """
    if separator is not None and tokenizer is None:
        raise click.UsageError("--separator is a token of a --tokenizer; bytes are separated by byte 0")
    check_not_input(output, tokenizer)
    # These load pyarrow, which --help does without.
    from raypipe.data import prepare as sources  # noqa: PLC0415
    from raypipe.data.tokenizers import FileTokenizer  # noqa: PLC0415

    made: sources.PreparedData | sources.PreparedRows
    if source in sources.FIELD_SOURCES:
        if tokenizer is not None:
            raise click.UsageError(f"{source} has tokens of its own; leave --tokenizer out")
        made = sources.prepare_rows(source, output=output, validation_fraction=validation_fraction)
        counts = ", ".join(f"{count} rows {split}" for split, count in made.num_rows.items())
        text = f"{made.path}: {made.source}, {counts}, {made.file_bytes} bytes"
    else:
        made = sources.prepare(
            source,
            output=output,
            validation_fraction=sources.DEFAULT_FRACTION if validation_fraction is None else validation_fraction,
            tokenizer=None if tokenizer is None else FileTokenizer(tokenizer, separator=separator),
        )
        text = (
            f"{made.path}: {made.num_documents} documents of {made.source}, {made.num_train_tokens} tokens to train with, "
            f"{made.num_validation_tokens} to validate with, {made.file_bytes} bytes"
        )
    if as_json:
        print_json(dataclasses.asdict(made))
    else:
        click.echo(visible(text))
