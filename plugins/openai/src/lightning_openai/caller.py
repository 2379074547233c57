"""Who calls a model, where that is to be known before there is a span."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lightning_spans.record.context import current_agent, current_attempt
from lightning_spans.record.recorder import standing
from lightning_spans.schema.attempts import Attempt

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import Recorder


class ModelCaller(NamedTuple):
    """Who calls."""

    agent: str | None
    path: str | None
    attempt: Attempt | None

    def goes_to(self, recorder: Recorder) -> Attempt | None:
        """Return the attempt whose policy answers its calls; None: they stay where they are."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.endpoint is not None and recorder.reroutes(self) else None


def caller_in(context: Context) -> ModelCaller:
    """Return who calls in a context."""
    agent = current_agent(context)
    path = None if agent is None else standing(agent, context)
    return ModelCaller(agent, path, current_attempt(context))
