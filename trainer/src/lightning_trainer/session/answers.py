"""The model that answers a program's agents: weights loaded here, a server, or the program's own endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_trainer import registry
from lightning_trainer.config.origin import chosen_format, options_of, run_of
from lightning_trainer.gateway.upstream.upstream import Upstream, parse_upstream
from lightning_trainer.models import look
from lightning_trainer.outgoing import bearer
from lightning_trainer.policies import ADAPTERS_NAME, Policies, parse
from lightning_trainer.proxies import through_proxy

if TYPE_CHECKING:
    import httpx

    from lightning_trainer.gateway.engine import Engine

_PROBE_S: Final = 10.0
_POLICY: Final = "policy"


@dataclass(frozen=True, slots=True)
class AsItIs:
    """The unmodified program: every call goes where it always goes."""

    @property
    def name(self) -> str:
        """Name in tables."""
        return "the program's own endpoints"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server.

    Attributes:
        url: its base URL.
        model: name of the model to request; None: its only one.
        key: its bearer key.
    """

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.model} at {self.url}" if self.model else self.url


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Weights that are loaded here.

    Attributes:
        model: a folder, a hub id, or a name that the backend knows.
        run: the run that produced them, which maps agents to adapters; None if they are not from a run.
    """

    model: str
    run: Path | None = None

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.model


Subject: TypeAlias = AsItIs | Endpoint | LocalModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSource:
    """A model that is ready to answer the calls of agents.

    Attributes:
        model: the name under which it is requested; None: calls go to the program's own endpoints.
        engines: engines that are loaded here.
        upstreams: servers elsewhere.
        policies: policy by agent, for agents that have their own.
    """

    model: str | None = None
    engines: Sequence[Engine] = ()
    upstreams: Sequence[Upstream] = ()
    policies: Policies = field(default_factory=Policies)

    @classmethod
    def of(cls, engines: Sequence[Engine], policies: Mapping[str, str]) -> AnswerSource:
        """Return the engines of a learner, for a run with these policies."""
        return cls(model=engines[0].model, engines=engines, policies=parse(policies))


def read_subject(text: str, *, key: str | None = None) -> Subject:
    """Parse what the user named: a URL, ``MODEL=URL``, a run, a checkpoint, a model folder, or a model's name.

    Raises:
        ConfigError: there is no such model, or a run has nothing to evaluate.
    """
    _, equals, url = text.partition("=")
    if text.startswith(("http://", "https://")):
        return endpoint(text, key=key)
    if equals and url.startswith(("http://", "https://")):
        return endpoint(url, model=text.partition("=")[0], key=key)
    return _weights(text)


def endpoint(url: str, *, model: str | None = None, key: str | None = None) -> Endpoint:
    """Parse the address of a server; one without a path gets ``/v1``.

    Raises:
        ConfigError: it is not a URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"endpoint {url!r}: give a URL, such as http://127.0.0.1:8000/v1.")
    return Endpoint(parse_upstream(f"model={url}").url, model, key)


def chosen_agents(subject: Subject) -> tuple[str, ...] | None:
    """Return the agents that a run trained; None if the subject is not from a run, or all were trained."""
    agents = _of_run(subject).get("agents")
    return tuple(agents) if agents else None


def name_rules(subject: Subject) -> tuple[str, ...]:
    """Return the rules by which a run named the agents of calls; empty if the subject is not from a run."""
    return tuple(_of_run(subject).get("name_by") or ())


def own_loading(subject: Subject) -> dict[str, Any]:
    """Return how a run loaded its model: tool call format and maximum length; {} if the subject is not from a run."""
    options = _of_run(subject)
    longest = options.get("max_model_len")
    return chosen_format(options) | ({} if longest is None else {"max_model_len": longest})


OF_CALLS: Final = ("temperature", "max_tokens", "sampling", "name_by")  # options that only apply to a model named here


def refuse_unheard(options: Mapping[str, object], *sides: object) -> None:
    """Reject options for calls to a model named here, if none is named: the program's own endpoints ignore them.

    Args:
        options: by name. None, () and ``asked`` count as not given.
        sides: subjects, and whatever else is compared.

    Raises:
        ConfigError: an option has no effect; the message names it.
    """
    given = [name for name, value in options.items() if value not in (None, (), "asked")]
    if given and not any(isinstance(side, Endpoint | LocalModel) for side in sides):
        raise ConfigError(
            f"{', '.join(given)}: of calls that come to a model named here, "
            "but all calls go to the program's own endpoints. Name one with --model or --endpoint, or leave this out."
        )


@contextmanager
def open_answers(subject: Subject, **options: Any) -> Iterator[AnswerSource]:
    """Load or reach the model that answers.

    Args:
        subject: the model.
        options: options of the torch backend, for weights that are loaded here.

    Raises:
        ConfigError: it cannot be loaded or reached.
    """
    if isinstance(subject, AsItIs):
        yield AnswerSource()
    elif isinstance(subject, Endpoint):
        model = subject.model or only_model(subject)
        if subject.model:
            _reach(subject)
        yield AnswerSource(model=model, upstreams=(Upstream(model, subject.url, subject.key),))
    else:
        with _load(subject, options) as found:
            yield found


@contextmanager
def _load(subject: LocalModel, options: dict[str, Any]) -> Iterator[AnswerSource]:
    adapters = (Path(subject.model) / ADAPTERS_NAME).is_file()
    policies = parse(options_of(subject.run).get("policies") or {}) if adapters and subject.run else Policies()
    if adapters and not policies.by_agent:
        raise ConfigError(f"{subject.model} has adapters, but does not name their agents. Give the run's folder.")
    name = None if adapters else _POLICY
    load = registry.by_name("backend", "torch").learner
    with closing(load(subject.model, {"name": name, **own_loading(subject), **options})) as learner:
        yield AnswerSource(model=learner.engine.model, engines=learner.engines, policies=policies)


def _weights(text: str) -> LocalModel:
    """Find the weights of a run, a checkpoint or a model.

    Raises:
        ConfigError: there is no such model.
    """
    found = look(text)
    if found.folder is None:
        return LocalModel(text)
    run = run_of(found)
    return LocalModel(text) if run is None and found.kind != "checkpoint" else LocalModel(str(found.folder), run)


def _of_run(subject: Subject) -> dict[str, Any]:
    """Return the options of the run that produced the weights; {} if they are not from a run."""
    return options_of(subject.run) if isinstance(subject, LocalModel) else {}


def only_model(subject: Endpoint) -> str:
    """Ask a server for its only model.

    Raises:
        ConfigError: it cannot be reached, does not list its models, or does not have exactly one.
    """
    import httpx

    try:
        answer = _models(subject)
        answer.raise_for_status()
        names = [str(model["id"]) for model in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"endpoint {subject.url} does not list its models ({why}). Name one with"
            " --model; if it needs a key, set LIGHTNING_UPSTREAM_KEY or --endpoint-key."
        ) from None
    if len(names) != 1:
        listed = ", ".join(names[:20]) or "none"
        raise ConfigError(f"endpoint {subject.url} has {len(names)} models: {listed}. Name one with --model.")
    return names[0]


def _reach(subject: Endpoint) -> None:
    """Make sure that a server accepts connections. It may be slow or not list its models: its calls may still work.

    Raises:
        ConfigError: it cannot be reached.
    """
    import httpx

    with suppress(httpx.TransportError):
        _models(subject)


def _models(subject: Endpoint) -> httpx.Response:
    """Request a server's list of models.

    Raises:
        ConfigError: it cannot be reached.
        httpx.TransportError: it does not answer.
    """
    import httpx

    headers = bearer(subject.key, f"the file or variable for {subject.url}")
    try:
        return httpx.get(f"{subject.url}/models", headers=headers, timeout=_PROBE_S)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ConfigError(
            f"endpoint {subject.url} can't be reached{through_proxy(subject.url)}: {error}. Is it running?"
        ) from None
