"""What the training loop may change while the server runs, and the limits that hold from its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.naming import NameRule
from lightning_trainer.policies import Policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where calls go and how answers are sampled. Replaced as a whole: ``app.state.routing = Routing(...)``.

    Attributes:
        agents: names or globs of the agents whose calls come to the gateway; part of each attempt's context.
        model: the policy they request, and the one that answers an attempt's call for an unknown model.
        endpoint: base URL given to agents, without ``/v1``; None: the one under which the runner reached the server.
        seed: of the run; with it, calls of attempts are sampled repeatably, and a seed that a call requests is combined
            with its rollout's. None: as requested, otherwise freely.
        temperature: used for every call of a policy that may be trained, whatever it requests, and recorded in its
            sampling; None: as requested.
        plain: whether such calls of attempts are sampled from the policy itself: without the top_p, top_k, min_p and
            penalties that they request, which are recorded with ``_asked`` after their names.
        max_tokens: most tokens of an answer whose request names no limit; None: as many as the context allows.
        policies: policy by agent name or glob, for agents with their own policy: it answers whatever model their calls
            name.
        unnamed: agent of calls that nothing names, of a program that is not attached. None: they have none.
        name_by: rules that name the agents of calls without a header; they have priority over `unnamed`.
        versions: number of the weights by model, for upstreams that do not report it.
        prompts: replacement system prompts of agents, by rollout: they go into its attempts' contexts.
        opponents: policies in place of `policies`, by rollout: with frozen weights of an agent.
    """

    agents: tuple[str, ...] = ()
    model: str = "policy"
    endpoint: str | None = None
    seed: int | None = None
    temperature: float | None = None
    plain: bool = False
    max_tokens: int | None = None
    policies: Policies = field(default_factory=Policies)
    unnamed: str | None = None
    name_by: tuple[NameRule, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    prompts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    opponents: Mapping[str, Policies] = field(default_factory=dict)

    def policies_of(self, rollout_id: str | None) -> Policies:
        """Return the policies of a rollout's agents."""
        return self.opponents.get(rollout_id or "", self.policies)

    def as_requested(self, policy: str) -> Routing:
        """Return how a policy's calls are sampled: those of a frozen one as requested, because they teach nothing.

        A grader that requests temperature 0 stays as it is. Opponents are sampled as the policy that they come from.
        """
        if not self.policies.is_frozen(policy):
            return self
        return replace(self, temperature=None, plain=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that protect the server. ``lightning-rl server --limit NAME=NUMBER`` sets one.

    Attributes:
        body_bytes: most bytes of a request's body, as sent and as unpacked.
        parsed_bytes: most bytes of memory that a parsed body may take, not counting its texts; estimated from its bytes
            before it is parsed.
        held_bytes: most bytes of all bodies in progress; a quarter of it for one attempt or live key.
        messages: most messages, items of input, or tools of a model call.
        parts: most objects and lists of a model call, nested or not.
        request_spans: most spans of a request.
        waiting_spans: most spans that wait to be written before senders are told to retry later.
        attempt_bytes: most bytes of bodies that an attempt may send in total.
        attempt_calls: most model calls of an attempt.
        attempt_spans: most spans that an attempt may send.
        live_bytes: most bytes of bodies that a live key may send per hour.
        live_spans: most spans that a live key may send per hour.
        key_margin_s: seconds that an attempt's key is valid beyond the attempt's time limit.
        untimed_key_s: seconds that the key of an attempt without a time limit is valid.
        late_spans_s: seconds after its end during which an attempt may still send spans; sampling stops at once.
    """

    body_bytes: int = 32 * 1024 * 1024
    parsed_bytes: int = 192 * 1024 * 1024
    held_bytes: int = 256 * 1024 * 1024
    messages: int = 10_000
    parts: int = 50_000
    request_spans: int = 10_000
    waiting_spans: int = 100_000
    attempt_bytes: int = 4 * 1024 * 1024 * 1024
    attempt_calls: int = 20_000
    attempt_spans: int = 200_000
    live_bytes: int = 16 * 1024 * 1024 * 1024
    live_spans: int = 2_000_000
    key_margin_s: float = 600.0
    untimed_key_s: float = 86_400.0
    late_spans_s: float = 60.0


def parse_limits(texts: Sequence[str]) -> Limits:
    """Parse ``NAME=NUMBER``, with the names of `Limits`.

    Raises:
        ConfigError: there is no such limit, or it is not a positive number.
    """
    kinds = {each.name: int if isinstance(each.default, int) else float for each in fields(Limits)}
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in kinds:
            raise ConfigError(f"--limit {text!r}: there is no limit {name!r}. There are: {', '.join(kinds)}.")
        try:
            found[name] = kinds[name](number)
        except ValueError:
            raise ConfigError(f"--limit {text!r}: give a number, such as {name}=1000.") from None
        if found[name] <= 0:
            raise ConfigError(f"--limit {text!r}: must be more than 0.")
    return Limits(**found)  # type: ignore[arg-type]  # each was made to its field's own type
