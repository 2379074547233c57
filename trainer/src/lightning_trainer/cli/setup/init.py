"""`lightning-rl init`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from lightning_trainer.run.starter import FRAMEWORKS


@click.command(name="init")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--framework",
    type=click.Choice(list(FRAMEWORKS)),
    help="Framework of the program; openai is plain code with the openai client. [default: langgraph]",
)
def command(*, folder: Path, framework: str | None) -> None:
    """Create a small project in FOLDER that is ready to train: program, tasks, reward, configuration, README."""
    from lightning_trainer.run.starter import install_line, missing, write_project

    if framework is None and folder.name in FRAMEWORKS:
        raise click.UsageError(
            f"{folder.name} is a framework, but a folder is needed. Run `lightning-rl init my-agent "
            f"--framework {folder.name}`, or name the framework next to the folder."
        )
    framework = framework or "langgraph"
    made = write_project(folder, framework)
    click.echo(f"a program for {framework}")
    for path in made:
        click.echo(f"made {path}")
    if absent := missing(framework):
        click.echo(
            f"\nNot installed here: {', '.join(absent)}. In a clone of Lightning-RL:\n  {install_line(framework)}"
        )
    click.echo(
        f"\nNow:\n  cd {shlex.quote(str(folder))}\n"
        "  lightning-rl agents agent:run --reward reward:score --data val.jsonl --model smollm2-135m\n"
        "  lightning-rl train --config run.toml --dry-run\n"
        "  lightning-rl train --config run.toml --out runs/first"
    )
