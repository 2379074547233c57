"""The `lightning-rl` command line: one file per command, here or in its kit, imported when the command is called."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import click

from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.record import stalls
from lightning_trainer import registry
from lightning_trainer.commands import ListedCommand
from lightning_trainer.config.other_names import translate
from lightning_trainer.proxies import bypass_for_loopback
from lightning_trainer.report.terminal import PrintableFormatter, printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


FRAME: Final = {
    "init": ListedCommand(
        "lightning_trainer.cli.setup.init",
        "Create a small project that is ready to train, in the framework you choose.",
    ),
    "agents": ListedCommand(
        "lightning_trainer.cli.training.agents",
        "List the agents of a program: calls, tokens, tool errors, rewards, and what would be trained.",
    ),
    "train": ListedCommand("lightning_trainer.cli.training.train", "Train the agents you name."),
    "tasks": ListedCommand(
        "lightning_trainer.cli.training.tasks", "Measure how hard each task is, and keep the tasks that have a signal."
    ),
    "runs": ListedCommand(
        "lightning_trainer.cli.records.runs", "List runs and compare them: rewards, cost, and how their options differ."
    ),
    "serve": ListedCommand(
        "lightning_trainer.cli.servers.serve", "Serve a trained checkpoint behind an OpenAI-compatible endpoint."
    ),
    "dequantise": ListedCommand(
        "lightning_trainer.cli.servers.dequantise", "Write the rounded model under adapters of --base-bits, for vLLM."
    ),
    "server": ListedCommand(
        "lightning_trainer.cli.servers.server", "Run store, gateway and trace receiver for several machines."
    ),
    "runner": ListedCommand(
        "lightning_trainer.cli.servers.runner", "Claim rollouts from a server and run the agent on them."
    ),
    "traces": ListedCommand("lightning_trainer.cli.records.traces", "Show traces, as trees or as JSON lines."),
    "prune": ListedCommand("lightning_trainer.cli.records.prune", "Delete old traces, by age, origin or id."),
    "key": ListedCommand("lightning_trainer.cli.servers.key", "Create, list and revoke the keys of a server."),
    "blame": ListedCommand(
        "lightning_trainer.cli.records.blame", "Show which agents earned the reward in a run: credit by agent and turn."
    ),
    "doctor": ListedCommand(
        "lightning_trainer.cli.setup.doctor", "Check this installation and say how to fix what does not work."
    ),
}


Command: TypeAlias = ListedCommand | click.Command


def _in_order(first: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return all commands: of those added, each after the one that it names, and at the end if it names none."""
    names = list(first)
    waiting = {name: str(getattr(each, "after", "")) for name, each in added.items()}
    while waiting:
        name = next((name for name, after in waiting.items() if after in names), None)
        if name is None:
            names += waiting
            break
        names.insert(names.index(waiting.pop(name)) + 1, name)
    return {name: first.get(name) or added[name] for name in names}


COMMANDS: Final[Mapping[str, ListedCommand]] = _in_order(FRAME, registry.kit_commands())


FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class LazyGroup(click.Group):
    """Imports commands when they are called, and prints intended errors on one screen."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of the commands as a user meets them. A plugin's are last, or where it says."""
        return list(_in_order(COMMANDS, _plugin_commands()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - likewise
        """Return a command, imported."""
        found = COMMANDS.get(cmd_name) or _plugin_commands().get(cmd_name)
        return _import_command(found, cmd_name) if isinstance(found, ListedCommand) else found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; for a misspelt name, fail and suggest the nearest one."""
        import difflib

        name = args[0]
        known = COMMANDS if name in COMMANDS else self.list_commands(ctx)
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        if name not in known and near:
            ctx.fail(f"No such command '{name}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions of the commands' names without importing them."""
        from click.shell_completion import CompletionItem

        own = [CompletionItem(name, help=each.help) for name, each in COMMANDS.items() if name.startswith(incomplete)]
        # plugins are loaded only if no command of ours matches, because that takes time at each press of the key
        others = [] if own else [CompletionItem(name) for name in _plugin_commands() if name.startswith(incomplete)]
        return own or others or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - likewise
        """List the commands without importing any `ListedCommand`."""
        with formatter.section("Commands"):
            every: dict[str, Command] = _in_order(COMMANDS, _plugin_commands())
            formatter.write_dl(
                (name, each.help if isinstance(each, ListedCommand) else each.get_short_help_str(200))
                for name, each in every.items()
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept ``--debug`` at any position."""
        ctx.obj = {"debug": "--debug" in args}
        try:
            return super().parse_args(ctx, [arg for arg in args if arg != "--debug"])
        except click.UsageError as error:
            raise _without_usage(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An intended error exits with its own status, an interrupt with 130."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _without_usage(error) from None
        except LightningError as error:
            if ctx.obj["debug"]:
                raise
            from lightning_trainer.gateway.http.masking import mask_secrets

            _print_error(printable(mask_secrets(str(error)), lines=True))
            ctx.exit(error.exit_status)
        except OSError as error:
            if ctx.obj["debug"] or error.errno not in FULL:
                raise
            where = f" at {error.filename}" if error.filename else ""
            _print_error(f"{error.strerror}{where}. Make room.")
            ctx.exit(1)
        except KeyboardInterrupt as interrupt:
            click.echo(str(interrupt) or "stopped", err=True)
            ctx.exit(130)


class CommandLineError(click.ClickException):
    """A mistake on the command line, printed like any other error, without click's usage text."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 - click's signature
        """Print the error."""
        _print_error(printable(self.message, lines=True))


def _print_error(text: str) -> None:
    click.echo(f"{click.style('error', fg='red', bold=True)}: {text}", err=True)


def _without_usage(error: click.UsageError) -> click.ClickException:
    """Return the error with the command whose ``--help`` explains it. A group without a command shows its help."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2 and later
        return error
    if isinstance(error, click.NoSuchOption):
        _suggest(error)
    text = error.format_message()
    more = "" if error.ctx is None else f" See {error.ctx.command_path} --help."
    ended = text.endswith((".", "?", "?)"))  # as click's hint at similar options does
    return CommandLineError(f"{text}{'' if ended else '.'}{more}")


def _suggest(error: click.NoSuchOption) -> None:
    """Suggest our name for the option if the given name is another trainer's name for it."""
    if error.ctx is not None:
        known = {flag for parameter in error.ctx.command.params for flag in parameter.opts}
        ours = translate(error.option_name.lstrip("-"), {flag.lstrip("-").replace("-", "_") for flag in known})
        if ours is not None:
            # click declares it final, but reads it when it shows the error
            error.possibilities = [f"--{ours.replace('_', '-')}"]  # type: ignore[misc]


def _import_command(listed: ListedCommand, name: str) -> click.Command:
    """Import a command.

    Raises:
        ConfigError: it is a plugin's, and its module can't be imported or has no `command`.
    """
    try:
        command: click.Command = import_module(listed.module).command
    except Exception as error:
        if name in COMMANDS:
            raise
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the command {name!r} of a plugin can't be imported from {listed.module}: {why}") from error
    return command


def _plugin_commands() -> dict[str, Command]:
    """Return the commands that plugins register with the hook `lightning_register_commands`.

    Raises:
        ConfigError: one has the name of one of our commands.
    """
    found = {name: each for name, each in registry.registrations("command").items() if COMMANDS.get(name) != each}
    if taken := sorted(found.keys() & COMMANDS.keys()):
        raise ConfigError(f"a plugin registers the command {taken[0]!r}, which lightning-rl has. Give it another name.")
    return found


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="lightning-trainer")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:  # noqa: ARG001 - click passes flags by name; parse_args has taken it
    """Train the agents of a program you already have, by reinforcement learning, agent by agent, by name."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would be drawn over our own display
    bypass_for_loopback(os.environ)
    _log_to_stderr()
    stalls.configure(os.environ.get("LIGHTNING_BOUNDS"))


def main() -> None:
    """Run the command line."""
    from lightning_trainer.runner.undumpable import keep_to_ourselves

    keep_to_ourselves()  # before any key is read
    if next((arg for arg in sys.argv[1:] if not arg.startswith("-")), None) == "runner":
        from lightning_trainer.cli.processes import hide_key

        hide_key(sys.orig_argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: names and texts may contain any character
    cli(prog_name="lightning-rl")


def _log_to_stderr() -> None:
    import logging

    from lightning_trainer.gateway.http.masking import mask_secrets

    class Formatter(PrintableFormatter):
        """Masks keys, including those in tracebacks."""

        def format(self, record: logging.LogRecord) -> str:
            return mask_secrets(super().format(record))

    class Stderr(logging.StreamHandler[Any]):
        """Writes to the current stderr: a live display replaces it."""

        def emit(self, record: logging.LogRecord) -> None:
            self.stream = sys.stderr
            super().emit(record)

    handler = Stderr()
    handler.setFormatter(Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
