"""Commands, each in a module that is imported when named: `raypipe schedule` starts without ray and torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click

from raypipe import __version__
from raypipe.cli.interruption import EXIT_INTERRUPTED
from raypipe.errors import InputError, RaypipeError, suggestion, visible

COMMANDS = (
    "init",
    "schedule",
    "schedules",
    "probe",
    "profile",
    "plan",
    "simulate",
    "rehearse",
    "train",
    "drill",
    "top",
    "runs",
    "export",
    "show",
    "calibrate",
    "data",
)
# Exit codes; 0 is success.
_EXIT_FAILURE = 1
_EXIT_BAD_INPUT = 2


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return cast(click.Command, getattr(importlib.import_module(f"raypipe.cli.{cmd_name}"), cmd_name))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(f"no command is called {args[0]!r}{suggestion(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, "--version", prog_name="raypipe", message="%(prog)s %(version)s")
@click.pass_context
def commands(context: click.Context) -> None:
    """Train models too large for one GPU as pipelines of Ray actors, on any network of machines."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _send_token() -> None:
    # Ray 2.60 lets clusters ask for a token where there is one; processes send theirs only if they are told to before Ray is loaded.
    if "RAY_AUTH_MODE" not in os.environ and Path("~/.ray/auth_token").expanduser().is_file():
        os.environ["RAY_AUTH_MODE"] = "token"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process, and return the exit code."""
    _send_token()
    try:
        result = commands.main(args=None if arguments is None else list(arguments), prog_name="raypipe", standalone_mode=False)
    except click.Abort:  # click's word for Ctrl-C
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"\ntry: {context.command_path} --help" if context else ""
        click.echo(visible(f"error: {error.format_message()}{hint}"), err=True)
        return _EXIT_BAD_INPUT
    except RaypipeError as error:
        click.echo(visible(f"error: {error}"), err=True)
        return _EXIT_BAD_INPUT if isinstance(error, InputError) else _EXIT_FAILURE
    return result if isinstance(result, int) else 0
