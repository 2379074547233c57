"""A scripted engine over a byte-level tokenizer, for tests that need model calls but no model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2

from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.replays import Replay
from lightning_spans.store import Store, open_store
from lightning_trainer.gateway.app import App, create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.engine import SampledPiece, Sampling
from lightning_trainer.gateway.http.serving import ServerThread

HERMES_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not (loop.first and tools)) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ByteTokenizer:
    """One token a byte, and two special ones; the part of a Hugging Face tokenizer that the gateway uses.

    Token 258 is "an" as one token: the same text has two tokenizations, as with real ones, and `encode` never gives it.
    """

    specials: ClassVar = {"<|im_start|>": 256, "<|im_end|>": 257}
    all_special_tokens: ClassVar = list(specials)
    eos_token_id = 257
    merged = 258

    def __init__(self, chat_template: str = HERMES_TEMPLATE) -> None:
        self.chat_template = chat_template
        self._template = _compile(chat_template)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **switches: Any,
    ) -> Any:
        shown = {"messages": conversation, "tools": tools, "add_generation_prompt": add_generation_prompt}
        text = self._template.render(**shown, **switches)
        return self.encode(text) if tokenize else text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            at, special = min(((text.find(s), s) for s in self.specials if s in text), default=(len(text), None))
            ids.extend(text[:at].encode())
            if special is not None:
                ids.append(self.specials[special])
            text = text[at + len(special or "") :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        names = {number: name for name, number in self.specials.items()}
        out = b""
        for token in ids:
            if token in names:
                out += b"" if skip_special_tokens else names[token].encode()
            else:
                out += b"an" if token == self.merged else bytes([token])
        return out.decode(errors="replace")

    def __len__(self) -> int:
        return 259


@cache
def _compile(chat_template: str) -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters["tojson"] = _tojson
    return environment.from_string(chat_template)


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


Script = Iterable[str | Sequence[int] | BaseException] | Callable[[str], str | Sequence[int] | BaseException]


class FakeEngine:
    """Answers from a script: texts, token ids, or exceptions to raise; or a function from the prompt's text to these.

    A script that has run out answers ``ok``. Every answer ends with the end-of-turn token unless it is cut by length or
    by a stop string. `prompts` and `samplings` hold what was asked for, `cancelled` counts answers closed early.
    """

    def __init__(
        self,
        script: Script = (),
        *,
        tokenizer: Any = None,
        model: str = "policy",
        version: int = 0,
        max_model_len: int = 100_000,
        piece: int = 4,
        delay_s: float = 0.0,
    ) -> None:
        self.model = model
        self.version = version
        self.tokenizer = tokenizer or ByteTokenizer()
        self.max_model_len = max_model_len
        self.prompts: list[tuple[int, ...]] = []
        self.samplings: list[Sampling] = []
        self.cancelled = 0
        self.play(script)
        self._piece = piece
        self._delay_s = delay_s

    def play(self, script: Script) -> None:
        """Go on with another script."""
        self._script = script if callable(script) else iter(script)

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        if not prompt or len(prompt) >= self.max_model_len:
            raise ValueError(f"{len(prompt)} tokens leave no room in a context of {self.max_model_len}")
        self.prompts.append(tuple(prompt))
        self.samplings.append(sampling)
        answer = self._next(prompt)
        if isinstance(answer, BaseException):
            raise answer
        ids, text, finish = self._cut(answer, sampling)
        try:
            for piece in self._pieces(ids, text, finish):
                await asyncio.sleep(self._delay_s)
                yield piece
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise

    def _next(self, prompt: Sequence[int]) -> str | Sequence[int] | BaseException:
        if callable(self._script):
            return self._script(self.tokenizer.decode(prompt))
        return next(self._script, "ok")

    def _cut(self, answer: str | Sequence[int], sampling: Sampling) -> tuple[list[int], str, str]:
        ids = self.tokenizer.encode(answer) if isinstance(answer, str) else list(answer)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        stops = [text.index(stop) for stop in sampling.stop if stop in text]
        if stops:
            end = max(stop for stop in sampling.stop if stop in text)
            ids = self.tokenizer.encode(text[: text.index(end) + len(end)])
            return ids[: sampling.max_tokens], text[: min(stops)], "stop"
        ids = [*ids, self.tokenizer.eos_token_id] if ids[-1:] != [self.tokenizer.eos_token_id] else ids
        if sampling.max_tokens is not None and len(ids) > sampling.max_tokens:
            ids = ids[: sampling.max_tokens]
            return ids, self.tokenizer.decode(ids, skip_special_tokens=True), "length"
        return ids, text, "stop"

    def _pieces(self, ids: list[int], text: str, finish: str) -> Iterable[SampledPiece]:
        given = ""
        for start in range(0, len(ids), self._piece):
            part = tuple(ids[start : start + self._piece])
            last = start + self._piece >= len(ids)
            so_far = self.tokenizer.decode(ids[: start + len(part)], skip_special_tokens=True).rstrip("\ufffd")
            so_far = text if last or len(so_far) > len(text) else so_far
            yield SampledPiece(
                part, tuple(fake_logprob(i) for i in part), so_far[len(given) :], finish if last else None
            )
            given = so_far


def fake_logprob(token: int) -> float:
    """The log-probability that the fake engine says a token had: the same for the same token."""
    return math.log((hashlib.sha256(str(token).encode()).digest()[0] + 1) / 257)


class Attempts:
    """A store in which attempts run, besides its own, that nobody queued."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.made: dict[str, AttemptRecord] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def attempts(self, *, attempt_ids: Sequence[str] | None = None, **filters: Any) -> list[AttemptRecord]:
        found = self._inner.attempts(attempt_ids=attempt_ids, **filters)
        known = {record.attempt_id for record in found}
        return [*found, *(self.made[name] for name in attempt_ids or () if name in self.made and name not in known)]


def run_attempt(app: App, attempt_id: str, rollout_id: str = "r", replay: Replay | None = None) -> None:
    """Let an attempt run in the store of an app of `create_app(Attempts(store))`."""
    rollout = Rollout(rollout_id=rollout_id, group_id="g", task={}, replay=replay)
    made = AttemptRecord(attempt_id=attempt_id, rollout=rollout, number=1, fence=1, worker="w")
    app.state.store.made.setdefault(attempt_id, made)


@dataclass
class Served:
    """A server that runs, and what it works with."""

    url: str
    app: App
    store: Store
    keys: Keys
    engine: FakeEngine

    def key(
        self,
        attempt_id: str,
        *,
        rollout_id: str | None = None,
        agent: str | None = None,
        replay: Replay | None = None,
    ) -> str:
        """The key of an attempt that runs; its rollout is named after it."""
        rollout_id = rollout_id or f"rollout of {attempt_id}"
        run_attempt(self.app, attempt_id, rollout_id, replay)
        given = {"rollout_id": rollout_id, "attempt_id": attempt_id, "agent": agent, "replay": replay is not None}
        return self.keys.issue("attempt", fence=1, **given)

    def end(self, attempt_id: str) -> None:
        """End an attempt that `key` made."""
        made = self.app.state.store.made
        made[attempt_id] = replace(made[attempt_id], status="succeeded", ended_ns=time.time_ns())
        self.app.state.forget(attempt_id)

    def calls(self, attempt_id: str) -> list[Call]:
        return self.store.calls(attempt_ids=[attempt_id])

    def recorded(self, attempt_id: str, number: int) -> list[Call]:
        """Wait for calls that are recorded after their client has gone, as those of a stream that it left."""
        end = time.monotonic() + 120.0
        while len(calls := self.calls(attempt_id)) < number and time.monotonic() < end:
            time.sleep(0.01)
        return calls


@contextmanager
def served(
    folder: Path, engine: FakeEngine | None = None, *, store: Store | None = None, **options: Any
) -> Iterator[Served]:
    """Serve an app with a store of its own on a free port; see `create_app` for the options."""
    kept = store or open_store(str(folder / "server.db"))
    engine, keys = engine or FakeEngine(), Keys.fresh()
    app = create_app(Attempts(kept), keys=keys, engine=engine, **options)
    thread = ServerThread(app)
    try:
        yield Served(thread.start(), app, kept, keys, engine)
    finally:
        thread.stop()
        kept.close()
