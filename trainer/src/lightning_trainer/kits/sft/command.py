"""`lightning-rl sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.common import config_options, given_flags, print_json
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import resume_option
from lightning_trainer.kits.sft.config import RoundsConfig, SftConfig
from lightning_trainer.options.tasks import TaskOptions


def _note(name: str) -> str:
    if name == "agents":
        return "(if the data names no agent: the agent to which its rows belong)"
    if name == "backend":
        return "(in sft: torch or tinker)"
    return "" if name in SftConfig.model_fields else "(rounds)"


@click.command(name="sft")
@click.argument("data", nargs=-1, metavar="[DATA... | TARGET]")
@field_option(TaskOptions, "data", dest="tasks", text="Tasks to sample on (rounds).")
@resume_option("Resume the interrupted run in this folder, after its last complete round or from its saved state.")
@click.option("--max-tokens", hidden=True)  # name in earlier versions; the configuration's error gives the new one
@config_options(RoundsConfig, leave_out=frozenset({"data", "target", "tasks"}), notes=_note)
def command(*, data: tuple[str, ...], tasks: Path | None, resume: Path | None, **flags: Any) -> None:
    """Fine-tune on conversations from files (.jsonl, .json, .parquet; from `export`, or a public data set) and stores.

    Only the agents' own text is learned. Recorded tokens are used if they belong to this model. With --rounds, the
    program TARGET runs on the tasks of --data and the best rollouts of each group are learned, once per round. The last
    line on stdout is JSON with the loss before and after, and the checkpoint; pass that to `train --model` to continue
    with RL.
    """
    flags = given_flags(flags)
    if resume is not None:
        given: dict[str, Any] = {"tasks": tasks, "data": data, **flags}
        _go_on(resume, {name: value for name, value in given.items() if value})
        return
    if "rounds" in flags:
        _sample_and_learn(data, tasks, flags)
        return
    of_rounds = sorted(flags.keys() - SftConfig.model_fields.keys() - {"max_tokens"})
    if tasks is not None or of_rounds:
        names = ["data"] if tasks is not None else of_rounds
        raise ConfigError(f"--{names[0].replace('_', '-')} is an option of rejection sampling: add --rounds N.")
    _sft(SftConfig(data=data, **flags))


def _sample_and_learn(data: tuple[str, ...], tasks: Path | None, flags: dict[str, Any]) -> None:
    if tasks is None:
        raise ConfigError("give the tasks to sample on: --data FILE.")
    if len(data) > 1:
        raise ConfigError(f"--rounds samples with one program: name one TARGET, not {', '.join(data)}.")
    config = RoundsConfig(**{"tasks": tasks, **({"target": data[0]} if data else {}), **flags})
    _rounds(config)


def _go_on(folder: Path, again: dict[str, Any]) -> None:
    from lightning_trainer.config.files import read_kept
    from lightning_trainer.config.passwords import hidden_options
    from lightning_trainer.kits.sft.rounds import rejection, state
    from lightning_trainer.kits.sft.sft import config_to_resume

    hidden = hidden_options(read_kept(folder, "Start a new run.")) if again else []
    if wrong := sorted(name for name in again if name not in hidden):
        raise ConfigError(f"a resumed run keeps its options. Leave out {', '.join(wrong)}.")
    if (folder / state.STATE_NAME).exists():
        _rounds(rejection.config_to_resume(folder, again), folder)
    else:
        _sft(config_to_resume(folder, again), folder)


def _rounds(config: RoundsConfig, resume: Path | None = None) -> None:
    from lightning_trainer.kits.sft.rounds.rejection import rejection_sampling
    from lightning_trainer.report.progress import ProgressDisplay

    with ProgressDisplay(f"sampling and learning: {config.target or config.command} with {config.model}") as progress:
        done = rejection_sampling(config, progress, resume=resume)
    click.echo(f"continue with it: lightning-rl train ... --model {done.checkpoint}", err=True)
    print_json(done.to_json())


def _sft(config: SftConfig, resume: Path | None = None) -> None:
    from lightning_trainer.kits.sft.sft import sft
    from lightning_trainer.report.progress import ProgressDisplay

    with ProgressDisplay(f"learning from {', '.join(config.data)} with {config.model}") as progress:
        done = sft(config, progress, resume=resume)
    click.echo(f"continue with it: lightning-rl train ... --model {done.checkpoint}", err=True)
    fitted = done.fitted
    print_json(
        {
            "loss_before": fitted.before,
            "loss_after": fitted.after,
            "checkpoint": str(done.checkpoint),
            "folder": str(done.folder),
            "steps": fitted.steps,
            "best_step": fitted.best,
            "rows": done.rows,
            "held_out": done.held_out,
            "recorded": done.recorded,
            "tokens": fitted.tokens,
            "left_out": done.left_out,
            "seconds": round(fitted.seconds, 1),
        }
    )
