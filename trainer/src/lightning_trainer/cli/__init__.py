"""`lightning-rl`: one file for each command, imported when the command is called."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, Final

import click

from lightning_spans import watch
from lightning_spans.errors import LightningError
from lightning_trainer.printable import PrintableFormatter, printable

# name -> the help's line; the command itself is `command` of the module with that name
COMMANDS: Final = {
    "agents": "List the agents of a program: calls, tokens, tool errors, rewards, and what would be trained.",
    "train": "Train the agents you name.",
    "serve": "Serve a trained checkpoint behind an OpenAI-compatible endpoint.",
    "server": "Run store, gateway and trace receiver for several machines.",
    "runner": "Claim rollouts from a server and run the agent on them.",
    "traces": "Show what happened, as a tree or as JSON lines.",
    "prune": "Delete old traces, by age, origin or id.",
    "key": "Make a key of a server's, such as one for a program in production.",
    "blame": "Say who earned the reward in a run: credit by agent and turn.",
    "doctor": "Say what works here, and what to do about what does not.",
}


class LazyGroup(click.Group):
    """Imports a command when it is called, and prints errors made on purpose on one screen."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Name the commands, in the order a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - likewise
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - likewise
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``--debug`` wherever it stands."""
        ctx.obj = {"debug": "--debug" in args}
        return super().parse_args(ctx, [arg for arg in args if arg != "--debug"])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error made on purpose ends with status 2, an interrupt with 130."""
        try:
            return super().invoke(ctx)
        except LightningError as error:
            if ctx.obj["debug"]:
                raise
            said = printable(str(error), lines=True)
            click.echo(f"{click.style('error', fg='red', bold=True)}: {said}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt as interrupt:
            click.echo(str(interrupt) or "stopped", err=True)
            ctx.exit(130)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="lightning-trainer")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:  # noqa: ARG001 - click passes flags by name; parse_args has taken it
    """Train the agents of a program you already have, by reinforcement learning, agent by agent, by name."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would be drawn through our own display
    _log_to_stderr()
    watch.configure(os.environ.get("LIGHTNING_BOUNDS"))


def main() -> None:
    """Run the command line."""
    cli(prog_name="lightning-rl")


def _log_to_stderr() -> None:
    import logging

    class Stderr(logging.StreamHandler[Any]):
        """Writes to whatever stderr is at that moment: a live display puts itself in between."""

        def emit(self, record: logging.LogRecord) -> None:
            self.stream = sys.stderr
            super().emit(record)

    handler = Stderr()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
