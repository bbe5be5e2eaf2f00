"""Command `raypipe data`."""

from __future__ import annotations

import dataclasses

import click

from raypipe.cli.options import check_not_input, example, json_option
from raypipe.cli.screen import print_json


@click.group(invoke_without_command=True)
@click.pass_context
def data(context: click.Context) -> None:
    """Prepare data to train on."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@data.command(
    epilog=example(
        "raypipe data prepare python-stdlib -o tokens.parquet", "raypipe data prepare texts/ --tokenizer tokenizer.json -o t.parquet"
    )
)
@click.argument("source")
@click.option("-o", "--output", required=True, type=click.Path(), metavar="FILE", help="File to write the tokens to (.parquet).")
@click.option("--validation-fraction", type=float, default=0.05, help="Share of the documents to keep for validation.")
@click.option(
    "--tokenizer", type=click.Path(), metavar="FILE", help="Tokenizer in the tokenizer.json format.  [default: each byte is a token]"
)
@click.option("--separator", metavar="TOKEN", help="Token of the tokenizer that ends each document.  [default: its end-of-text token]")
@json_option
def prepare(source: str, *, output: str, validation_fraction: float, tokenizer: str | None, separator: str | None, as_json: bool) -> None:
    """Turn text into tokens: one a byte, or those of a tokenizer.

    SOURCE is a text file, a folder of them, or python-stdlib for the source of Python's standard library.
    """
    if separator is not None and tokenizer is None:
        raise click.UsageError("--separator is a token of a --tokenizer; bytes are separated by byte 0")
    check_not_input(output, tokenizer)
    from raypipe.data.prepare import prepare as prepare_tokens  # noqa: PLC0415  # loads pyarrow: not for --help
    from raypipe.data.tokenizers import FileTokenizer  # noqa: PLC0415  # likewise

    made = None if tokenizer is None else FileTokenizer(tokenizer, separator=separator)
    prepared = prepare_tokens(source, output=output, validation_fraction=validation_fraction, tokenizer=made)
    if as_json:
        print_json(dataclasses.asdict(prepared))
        return
    click.echo(
        f"{prepared.path}: {prepared.num_documents} documents of {prepared.source}, {prepared.num_train_tokens} tokens to train with, "
        f"{prepared.num_validation_tokens} to validate with, {prepared.file_bytes} bytes"
    )
