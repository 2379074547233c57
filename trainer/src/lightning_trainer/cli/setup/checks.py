"""Checks for `lightning-rl doctor`: what works on this machine, and how to fix what does not."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from lightning_spans.errors import AttachError, LightningError
from lightning_trainer import registry

State: TypeAlias = Literal["ok", "broken", "absent"]

OURS: Final = ("lightning-spans", "lightning-trainer")
FRAMEWORKS: Final = (
    "openai", "langchain-core", "langchain", "langgraph", "openai-agents", "autogen-agentchat", "crewai",
    "pydantic-ai-slim", "google-adk", "llama-index-core", "dspy", "strands-agents", "agno", "smolagents",
    "haystack-ai", "agent-framework-core", "semantic-kernel", "ag2", "claude-agent-sdk",
)  # fmt: skip
FOLLOWED: Final = ("anthropic", "google-genai", "ollama", "cohere", "litellm")  # clients other than openai's
ELSEWHERE: Final = ("boto3",)  # likewise, but their calls are reported only by frameworks
TRAINING: Final = ("torch", "transformers", "peft", "safetensors")


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        what: what was checked.
        state: ``ok``, ``broken``, or ``absent`` if it is missing but not required.
        found: the finding.
        do: what to do; empty if there is nothing to do.
    """

    what: str
    state: State
    found: str
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)


def examine(
    *, model: str | None = None, store: str | None = None, server: str | None = None, key: str | None = None
) -> Iterator[Check]:
    """Check this machine, and a model, a store and a server if they are named."""
    yield Check("Python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for name in OURS:
        yield Check(name, "ok", _version(name) or "not installed as a package")
    yield from _plugins()
    for name in FRAMEWORKS:
        found = _version(name)
        yield Check(name, "ok" if found else "absent", found or "not installed; needed only if your program imports it")
    yield from _elsewhere()
    yield _training()
    yield from _engine()
    if model is not None:
        yield _try_check("model", lambda: _model(model), "Give a folder that has config.json, tokenizer and weights.")
    if store is not None:
        yield _try_check("store", lambda: _store(store), "Check the path or URL, and its permissions.")
    if server is not None:
        yield _try_check(
            "server", lambda: _server(server, key), "Is it running? Its first line names URL and key file."
        )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plugins() -> Iterator[Check]:
    """Load every plugin as attach() does, and bind its hooks once."""
    from lightning_spans import hooks as plugins
    from lightning_spans.hooks import PROJECT

    names = sorted({entry.name for entry in entry_points(group=PROJECT)})
    if not names:
        yield Check("plugins", "broken", "none is installed", "pip install lightning-langchain (or lightning-openai)")
    for name in names:
        yield _try_check(f"plugin {name}", functools.partial(_bind, plugins, name), f"Is {name} itself installed?")


def _bind(plugins: Any, name: str) -> str:
    from lightning_spans.record.recorder import SpanRecorder
    from lightning_spans.record.tracing.tracers import make_tracer

    plugins.load(name)
    plugin = plugins.manager().get_plugin(name)
    hooks = sorted(caller.name for caller in plugins.manager().get_hookcallers(plugin) or ())
    for kind in registry.kinds():
        registry.registrations(kind)
    if name in plugins.left_out:
        raise AttachError(plugins.left_out[name])
    if "lightning_attach" in hooks:
        recorder = SpanRecorder(make_tracer("embedded", _Nowhere()))
        undo = plugins.manager().hook.lightning_attach(framework=name, recorder=recorder)
        if undo is not None:
            undo()
    return f"implements {', '.join(hooks) or 'no hook'}"


class _Nowhere:
    """A sink for the time while a plugin is tried."""

    def put(self, span: object, attempt: object) -> None:
        """Discard a span."""

    def flush(self, timeout_s: float) -> bool:  # noqa: ARG002 - the protocol's signature
        """Return True: nothing is waiting."""
        return True

    def close(self, timeout_s: float = 0.0) -> None:
        """Do nothing: nothing is open."""


def _elsewhere() -> Iterator[Check]:
    """Report for each installed client what happens to calls made with it."""
    for name in FOLLOWED:
        if (found := _version(name)) is not None:
            yield Check(f"client {name}", "ok", f"{found}; its calls are recorded, and go to the policy in training")
    for name in ELSEWHERE:
        if (found := _version(name)) is not None:
            yield Check(
                f"client {name}",
                "ok",
                f"{found}; calls that a framework makes with it are recorded without tokens, those of plain code not "
                "at all. None can be trained: an agent that is to be trained needs an OpenAI-compatible client",
            )


def _training() -> Check:
    missing = [name for name in TRAINING if find_spec(name) is None]
    if missing:
        return Check(
            "training",
            "absent",
            f"without {', '.join(missing)}",
            'To train or serve: pip install "lightning-trainer[torch]"',
        )
    return Check("training", "ok", ", ".join(f"{name} {_version(name)}" for name in TRAINING))


def _engine() -> Iterator[Check]:
    if any(find_spec(name) is None for name in TRAINING):
        return
    from lightning_trainer.backends.torch.describe import describe

    yield _try_check("engine", describe, "Reinstall torch for this machine.")


def _model(name: str) -> str:
    from lightning_trainer.models import look

    model = look(name)
    if model.folder is None:
        verb = "made" if model.kind == "made" else "fetched from the model hub"
        return f"{name} is not on this machine yet; it is {verb} when it is first used"
    return f"{name} has its parts: {model.folder}"


def _store(url: str) -> str:
    from lightning_spans.store import open_store

    path = Path(url.removeprefix("sqlite:///")) if "://" not in url or url.startswith("sqlite:///") else None
    if path is not None and not path.exists():
        if not os.access(path.absolute().parent, os.W_OK):
            raise LightningError(f"{path} can't be created: its folder does not exist or is not writable.")
        return f"{path} does not exist yet, and can be created"
    store = open_store(url)
    try:
        rollouts = store.rollouts()
    finally:
        store.close()
    return f"{url} can be read; {len(rollouts)} rollouts"


def _server(url: str, key: str | None) -> str:
    import httpx

    answer = httpx.get(f"{url.rstrip('/')}/healthz", timeout=5.0)
    if answer.status_code != 200:
        raise LightningError(f"{url} answers {answer.status_code}: {answer.text[:200]}")
    if key is None:
        return f"{url} works; no key was given, so keys were not checked"
    models = httpx.get(f"{url.rstrip('/')}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=5.0)
    if models.status_code != 200:
        raise LightningError(f"{url} refuses the key: {models.text[:200]}")
    names = ", ".join(model["id"] for model in models.json()["data"]) or "no model"
    return f"{url} works and accepts the key; it serves {names}"


def _try_check(what: str, look: Callable[[], str], do: str) -> Check:
    try:
        return Check(what, "ok", look())
    except LightningError as error:  # its message already says what to do
        return Check(what, "broken", str(error))
    except Exception as error:  # noqa: BLE001 - whatever is wrong is the finding
        return Check(what, "broken", f"{type(error).__name__}: {error}", do)
