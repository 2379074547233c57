"""`lightning-rl train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.cli.options import config_options, given, print_json
from lightning_trainer.config import TrainConfig, merge


@click.command(name="train")
@click.argument("target", required=False)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="TOML file with these options as keys, _ for -. Flags go first.",
)
@click.option("--dry-run", is_flag=True, help="Show what verl would be told and what it needs, and start nothing.")
@config_options(leave_out=frozenset({"target"}))
def command(*, target: str | None, file: Path | None, dry_run: bool, **flags: Any) -> None:
    """Train the agents that you name in the program TARGET (module:function), which is called as run(task).

    It returns the reward: a number, or numbers by agent name. The last line on stdout is JSON with the rewards before
    and after, the run's folder and its checkpoint.
    """
    from lightning_trainer.progress import Shown
    from lightning_trainer.training import train

    config = _config(file, {**given(flags), **({"target": target} if target else {})})
    if dry_run:
        click.echo(_described(config))
        return
    with Shown(_title(config)) as progress:
        result = train(config, progress)
    rewards = {"reward_before": result.reward_before, "reward_after": result.reward_after}
    if result.checkpoint is not None:
        click.echo(f"curve: {result.folder / 'curve.png'}\nserve it: lightning-rl serve {result.checkpoint}", err=True)
    print_json(
        {
            **rewards,
            "by_agent_before": dict(result.before.by_agent) if result.before else {},
            "by_agent_after": dict(result.after.by_agent) if result.after else {},
            "steps": result.steps,
            "alarms": [{"after_steps": alarm.step, "text": alarm.text} for alarm in result.alarms],
            "folder": str(result.folder),
            "checkpoint": str(result.checkpoint) if result.checkpoint else None,
            "seconds": round(result.seconds, 1),
        }
    )


def _config(file: Path | None, flags: dict[str, Any]) -> TrainConfig:
    """Put the options together: a run that goes on has those it began with, then the file's, then the flags."""
    if flags.get("resume"):
        from lightning_trainer.folders import read_config

        return merge(file, flags, base=read_config(Path(flags["resume"])))
    return merge(file, flags)


def _described(config: TrainConfig) -> str:
    if config.backend != "verl":
        raise ConfigError("--dry-run shows the configuration of verl. Add --backend verl, or leave it out.")
    from lightning_trainer.backends.verl import describe

    return describe(config)


def _title(config: TrainConfig) -> str:
    agents = "all agents" if config.agents is None else ", ".join(config.agents)
    return f"training {agents} of {config.target or config.command} from {config.model}"
