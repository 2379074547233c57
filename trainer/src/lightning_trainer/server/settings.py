"""What the training loop may change while the server runs, and the limits that hold from its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_trainer.policies import Policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where calls go and how answers are drawn. Replaced as a whole: ``app.state.routing = Routing(...)``.

    Attributes:
        agents: names or globs of the agents whose calls come to the gateway; goes into each attempt's context.
        model: the policy they ask for, and the one that answers an attempt's call for a model unknown here.
        endpoint: base URL given to agents, without ``/v1``; None: the one under which the runner reached the server.
        seed: of the run; with it, calls of attempts that ask for no seed are drawn repeatably. None: drawn freely.
        temperature: holds for every call, whatever it asks for, and is recorded in its sampling; None: as asked.
        max_tokens: most tokens of an answer whose request names no limit; None: what the context leaves.
        policies: policy by agent name or glob, for agents that have one of their own: it answers whatever model their
            calls name.
        unnamed: agent of calls that nothing names: of a program that is not attached. None: they stay without one.
        versions: number of the weights by model, for upstreams that can't tell it themselves.
    """

    agents: tuple[str, ...] = ()
    model: str = "policy"
    endpoint: str | None = None
    seed: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    policies: Policies = field(default_factory=Policies)
    unnamed: str | None = None
    versions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that protect the server.

    Attributes:
        body_bytes: most bytes of a request's body, unpacked.
        waiting_spans: most spans that wait to be written before senders are told to come later.
        key_margin_s: seconds that an attempt's key lives beyond the attempt's time limit.
        untimed_key_s: seconds that the key of an attempt without a time limit lives.
        late_spans_s: seconds after its end during which an attempt may still send spans; sampling stops at once.
    """

    body_bytes: int = 32 * 1024 * 1024
    waiting_spans: int = 100_000
    key_margin_s: float = 600.0
    untimed_key_s: float = 86_400.0
    late_spans_s: float = 60.0
