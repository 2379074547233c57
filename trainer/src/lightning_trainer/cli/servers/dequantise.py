"""`lightning-rl dequantise`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lightning_trainer.flags.answers import device_option, dtype_option
from lightning_trainer.flags.common import given_flags


@click.command(name="dequantise")
@click.argument("checkpoint")
@click.argument("folder", type=click.Path(path_type=Path))
@device_option
@dtype_option
def command(*, checkpoint: str, folder: Path, **options: Any) -> None:
    r"""Write the rounded model that adapters were trained over with --base-bits.

    CHECKPOINT is a run, a checkpoint, or one adapter in it. FOLDER receives a model folder in an ordinary number
    format, so it takes as much space as the unrounded model. Start vLLM with it to serve the adapters:

    \b
        lightning-rl dequantise runs/NAME ./rounded
        vllm serve ./rounded --served-model-name base --enable-lora --max-lora-rank 16
        lightning-rl server --upstream base=http://127.0.0.1:8000/v1 --adapters runs/NAME
    """
    from lightning_trainer import models
    from lightning_trainer.backends.torch.backend import need_torch

    need_torch()
    from lightning_trainer.backends.torch.checkpoint import write_base

    base = write_base(models.resolve(checkpoint), folder, **given_flags(options))
    click.echo(f"{folder}: {base.folder} with the weights of its linear layers rounded to {base.bits} bits")
