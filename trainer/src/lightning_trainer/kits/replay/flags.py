"""Options that `fork` and `replay` share, and values read from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_trainer.flags.answers import max_tokens_option
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.group import group_options
from lightning_trainer.flags.program import timeout_option, workers_option
from lightning_trainer.options.measuring import RequestOptions
from lightning_trainer.options.sampling import SeedOptions

if TYPE_CHECKING:
    from lightning_trainer.session.answers import Subject

sampling_options = group_options(
    field_option(RequestOptions, "temperature", text="Sampling temperature, set on all sampled calls."),
    max_tokens_option,
    field_option(SeedOptions, "seed", text="Sampling seed.", filled=True),
    timeout_option(),
    workers_option,
)


def subject_of(model: str | None, endpoint: str | None, key: str | None) -> Subject | None:
    """Return the model that answers; None if no option names one."""
    from lightning_trainer.session import answers

    if endpoint is not None:
        return answers.endpoint(endpoint, model=model, key=key)
    return None if model is None else answers.read_subject(model, key=key)
