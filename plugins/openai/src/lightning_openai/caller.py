"""The agent that calls a model, when it must be known before a span exists."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lightning_spans.record.context import current_agent, current_attempt
from lightning_spans.record.recorder import standing
from lightning_spans.schema.attempts import Attempt

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import Recorder


class ModelCaller(NamedTuple):
    """The agent that calls."""

    agent: str | None
    path: str | None
    attempt: Attempt | None

    def goes_to(self, recorder: Recorder) -> Attempt | None:
        """Return the attempt whose policy answers its calls; None if the calls keep their own endpoint."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.endpoint is not None and recorder.reroutes(self) else None


def caller_in(context: Context) -> ModelCaller:
    """Return the calling agent of a context."""
    agent = current_agent(context)
    path = None if agent is None else standing(agent, context)
    return ModelCaller(agent, path, current_attempt(context))
