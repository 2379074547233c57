"""A candidate answers copies of live calls: users never get or wait for its answers, and no tool runs for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_conformance import ScriptedServer
from lightning_spans.record.production import EVERYTHING, Live
from lightning_spans.record.redaction import read_rules
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import open_store
from lightning_spans.store.protocol import Where, each
from lightning_spans.store.traces import newest_traces, traces_of
from lightning_trainer.gateway.engine import SampledPiece, Sampling
from lightning_trainer.kits.deploy.routing import draw
from lightning_trainer.kits.deploy.shadow.comparison import ShadowRules
from lightning_trainer.kits.deploy.shadow.copies import ShadowCopies
from lightning_trainer.kits.deploy.shadow.summary import describe_shadow
from lightning_trainer.kits.deploy.table import read_histories
from lightning_trainer.kits.deploy.transitions import Policy, begin_shadow, name_candidate
from support.cli import call, told
from support.fakes import FakeEngine
from support.gateway.deployed import Deployed, deployed
from support.training.judged import by_length

TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}


class HeldEngine(FakeEngine):
    """Answers nothing until a test lets it."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.may_answer = threading.Event()

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        await asyncio.to_thread(self.may_answer.wait, 120)
        async for piece in super().generate(prompt, sampling):
            yield piece


class Shadow:
    """A gateway whose candidate is in a shadow."""

    def __init__(
        self, folder: Path, stack: ExitStack, new: FakeEngine, old: FakeEngine, live: Live = EVERYTHING, **options: Any
    ) -> None:
        self.seen: list[str] = []
        self.changed = threading.Condition()

        def copies(app: Any) -> ShadowCopies:
            made = ShadowCopies(app.state.store, count=self.count, **options)
            app.state.gateway.end_with(made.close)
            return made

        self.here: Deployed = stack.enter_context(deployed(folder, copies=copies, engine=[old, new], live=live))
        self.here.change(name_candidate, Policy("new"), stable="old")

    def begin(self, share: float = 1.0, **rules: Any) -> None:
        def begin(current: Any, agent: str, note: Any) -> Any:
            return replace(
                begin_shadow(current, agent, share, note), details={SHADOW: ShadowRules(**rules).to_details()}
            )

        self.here.change(begin)

    def say_in(self, trace: str, **options: Any) -> str | None:
        """Call the agent's model within a trace."""
        headers = {"traceparent": f"00-{trace * 32}-{'b' * 16}-01"}
        create = self.here.client(**options).chat.completions.create
        reply = create(model="old", messages=[{"role": "user", "content": "hi"}], extra_headers=headers)
        return reply.choices[0].message.content

    def count(self, outcome: str) -> None:
        with self.changed:
            self.seen.append(outcome)
            self.changed.notify_all()

    def wait(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.seen) >= number, 120)

    def found(self) -> dict[str, Any]:
        found = describe_shadow(self.here.server.store, read_histories(self.here.server.store)["writer"])
        assert found is not None
        return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def engine(name: str, script: Any = None, kind: type[FakeEngine] = FakeEngine) -> Any:
    return kind(script or (lambda _: name), model=name)


def test_users_neither_get_nor_wait_for_the_candidates_answers_and_dropped_copies_are_counted(
    tmp_path: Path, stack: ExitStack
) -> None:
    new = engine("new", kind=HeldEngine)
    shadow = Shadow(tmp_path, stack, new, engine("old"), most=2)
    assert shadow.here.say("before") == "old"
    shadow.begin()
    assert {shadow.here.say(f"c{number}") for number in range(5)} == {"old"}, "the candidate answers none of them"
    shadow.wait(3)
    assert shadow.seen == ["dropped"] * 3
    new.may_answer.set()
    shadow.wait(5)
    found = shadow.found()
    assert (found["copies"], found["dropped"], found["failed"]) == (2, 3, 0)
    assert found["agreement"]["text"]["mean"] == 0.0
    assert found["tokens"]["candidate"] == found["tokens"]["stable"]  # "old" and "new" have as many
    assert found["seconds"]["candidate"]["p95"] > 0


def test_copies_are_marked_and_enter_no_trace_that_is_trained_on(tmp_path: Path, stack: ExitStack) -> None:
    shadow = Shadow(tmp_path, stack, engine("new"), engine("old"))
    shadow.begin()
    attempt = shadow.here.server.key("a1")
    assert {shadow.here.say("c1"), shadow.here.say(key=attempt)} == {"old"}
    assert {shadow.say_in("a"), shadow.say_in("c", key=attempt)} == {"old"}
    shadow.wait(4)
    store = shadow.here.server.store
    copies = list(each(store, Call, Where(origin=SHADOW)))
    assert [(one.policy, one.attempt_id, one.request) for one in copies] == [("new", None, {})] * 4
    live = {one.response_id for one in store.calls() if one.origin != SHADOW}
    assert {one.sampling[SHADOW]["of"] for one in copies} == live
    for read in (traces_of(store), list(newest_traces(store)), traces_of(store, attempt_ids=["a1"])):
        assert {node.call.policy for trace in read for node in trace.nodes if node.call} == {"old"}
    assert len(traces_of(store, origin=SHADOW)) == 4


def test_a_copy_is_deleted_with_its_live_call(tmp_path: Path, stack: ExitStack) -> None:
    shadow = Shadow(tmp_path, stack, engine("new"), engine("old"))
    shadow.begin()
    shadow.say_in("a")
    shadow.say_in("c", key=shadow.here.server.key("a1"))
    shadow.here.say("c1")
    shadow.wait(3)
    store = shadow.here.server.store

    def left() -> list[tuple[str, str | None]]:
        return sorted((one.origin, one.attempt_id) for one in each(store, Call))

    assert store.delete(trace_ids=["a" * 32]) == 2
    assert left() == [("live", None), (SHADOW, None), (SHADOW, None), ("training", "a1")]


def test_copies_are_masked_as_their_live_calls_and_none_is_made_of_a_call_that_is_not_recorded(
    tmp_path: Path, stack: ExitStack
) -> None:
    live = Live(rate=0.5, redaction=read_rules(["/new|hi/"], {}))
    shadow = Shadow(tmp_path, stack, engine("new"), engine("old"), live=live)
    shadow.begin()
    assert {shadow.say_in("f"), shadow.say_in("1")} == {"old"}  # the first trace is left out
    shadow.wait(1)
    [copy] = each(shadow.here.server.store, Call, Where(origin=SHADOW))
    assert "new" not in str(copy.choices)
    assert (copy.prompt_token_ids, copy.choices[0].token_ids) == (None, None), "the prompt has what was masked"


def test_only_the_share_is_copied_and_an_equal_answer_agrees(tmp_path: Path, stack: ExitStack) -> None:
    shadow = Shadow(tmp_path, stack, engine("new", lambda _: "old "), engine("old"))
    shadow.begin(share=0.5)
    for number in range(20):
        shadow.here.say(f"c{number}")
    expected = sum(draw("writer", "new", f"conversation:c{number}") < 0.5 for number in range(20))
    shadow.wait(expected)
    found = shadow.found()
    assert (found["copies"], found["agreement"]["all"]["mean"]) == (expected, 1.0)


def calls_tool(argument: int, said: str = "") -> str:
    return f'{said}<tool_call>\n{{"name": "look", "arguments": {{"q": {argument}}}}}\n</tool_call>'


def talk(here: Deployed) -> str:
    """A turn in which the stable policy calls a tool, whose result the program sends."""
    create = partial(here.client("c").chat.completions.create, model="old", tools=[TOOL])
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    first = create(messages=messages).choices[0].message
    messages += [first.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": one.id, "content": "rain"} for one in first.tool_calls or ()]
    return create(messages=messages).choices[0].message.content or ""


def test_an_identical_tool_call_is_answered_by_its_recorded_result(tmp_path: Path, stack: ExitStack) -> None:
    old = engine("old", lambda prompt: "wet" if "rain" in prompt else calls_tool(1, "Looking."))
    new = engine("new", lambda prompt: "soaked" if "rain" in prompt else calls_tool(1, "I look."))
    shadow = Shadow(tmp_path, stack, new, old)
    shadow.begin()
    assert talk(shadow.here) == "wet"
    shadow.wait(2)
    prompt = new.tokenizer.decode(new.prompts[1])
    seen = [text in prompt for text in ("I look.", "rain", "Looking.")]
    assert seen == [True, True, False], "it continues its own answer"
    found = shadow.found()
    assert (found["agreement"]["tool_call"]["mean"], found["agreement"]["text"]["mean"]) == (1.0, 0.0)


def test_after_another_tool_call_the_rest_of_the_turn_is_not_copied(tmp_path: Path, stack: ExitStack) -> None:
    old = engine("old", lambda prompt: "wet" if "rain" in prompt else calls_tool(1))
    new = engine("new", lambda _: calls_tool(2))
    shadow = Shadow(tmp_path, stack, new, old)
    shadow.begin()
    assert talk(shadow.here) == "wet"
    shadow.wait(2)
    assert sorted(shadow.seen) == ["answered", "off path"]
    assert len(new.prompts) == 1
    shadow.here.say("another")
    shadow.wait(3)
    assert (shadow.found()["copies"], shadow.found()["off_path"]) == (2, 1)


def test_a_candidate_that_fails_disturbs_nobody_and_is_counted(tmp_path: Path, stack: ExitStack) -> None:
    shadow = Shadow(tmp_path, stack, engine("new", lambda _: RuntimeError("out of memory")), engine("old"))
    shadow.begin()
    assert shadow.here.say("c") == "old"
    shadow.wait(1)
    found = shadow.found()
    assert (found["failed"], found["agreement"]["all"]["mean"]) == (1, 0.0)


def test_a_judge_compares_answers_that_differ(tmp_path: Path, stack: ExitStack) -> None:
    judge = stack.enter_context(ScriptedServer(by_length))
    answers = {"same": "old", "other": "new" * 20}
    new = engine("new", lambda prompt: next(text for name, text in answers.items() if name in prompt))
    shadow = Shadow(tmp_path, stack, new, engine("old"))
    shadow.begin(judge={"endpoint": judge.url, "model": "j"}, rules=("longer-than-50",))
    shadow.here.say("c1", text="same")
    shadow.here.say("c2", text="other")
    shadow.wait(2)
    found = shadow.found()
    assert len(judge.requests) == 1, "equal answers need no judge"
    assert found["judge"]["difference"] > 0.2
    assert found["judge"]["n"] == 2
    assert found["rules"] == {"longer-than-50": {"candidate": 0.5, "stable": 0.0}}


def test_a_rule_that_is_added_later_counts_the_copies_that_were_compared_with_it(
    tmp_path: Path, stack: ExitStack
) -> None:
    judge = stack.enter_context(ScriptedServer(by_length))
    shadow = Shadow(tmp_path, stack, engine("new", lambda _: "new" * 20), engine("old"))
    shadow.begin(rules=("cut",))
    shadow.here.say("c1")
    shadow.wait(1)
    shadow.begin(rules=("longer-than-50",), judge={"endpoint": judge.url, "model": "j"})
    shadow.here.say("c2")
    shadow.wait(2)
    found = shadow.found()
    assert (found["copies"], found["judge"]["n"]) == (2, 1)
    assert found["rules"] == {"longer-than-50": {"candidate": 1.0, "stable": 0.0}}


def test_a_running_shadow_keeps_what_is_not_given_again(tmp_path: Path) -> None:
    path = tmp_path / "lightning.db"
    open_store(str(path)).close()

    def compared(*words: str) -> tuple[float, Any]:
        result = call("deploy", *words, "--agent", "writer", "--store", path)
        assert result.exit_code == 0, result.output
        with closing(open_store(str(path))) as store:
            newest = read_histories(store)["writer"][-1]
        return newest.share, newest.details.get(SHADOW)

    compared("candidate", "--model", "new", "--stable", "old")
    judge = {"endpoint": "http://judge/v1", "model": "large"}
    share, first = compared("shadow", "--rule", "cut", *(f"--judge={name}={value}" for name, value in judge.items()))
    assert (share, first) == (1.0, {"rules": ["cut"], "judge": judge})
    assert compared("shadow", "--share", "50%") == (0.5, first)
    assert compared("shadow", "--share", "50%", "--rule", "refused") == (0.5, {"rules": ["refused"], "judge": judge})
    assert compared("shadow", "--judge", "none") == (0.5, {"rules": ["refused"], "judge": None})


def test_the_command_begins_a_shadow_and_status_shows_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "lightning.db"
    open_store(str(path)).close()
    where = ("--agent", "writer", "--store", path)
    assert "No agent has a deployment in" in call("deploy", "status", "--store", path).stdout
    told(call("deploy", "shadow", *where), "no candidate")
    assert call("deploy", "candidate", "--model", "new", "--stable", "old", *where).exit_code == 0
    told(call("deploy", "shadow", "--rule", "rude", *where), "no guardrail 'rude'")
    told(call("deploy", "shadow", "--judge", "model=j", *where), "endpoint is missing")
    begun = call("deploy", "shadow", "--share", "20%", *where, "--json")
    assert begun.exit_code == 0, begun.output
    agent = json.loads(begun.stdout)["agents"]["writer"]
    assert (agent["stage"], agent["share"], agent["shadow"]["copies"]) == ("shadow", 0.2, 0)
    assert "0 copies of 0 conversations" in call("deploy", "status", "--store", path).stdout
    assert call("deploy", "canary", *where).exit_code == 0
    told(call("deploy", "shadow", *where), "in a canary already")
    with closing(open_store(str(path))) as store:
        assert [one.stage for one in read_histories(store)["writer"]] == ["candidate", "shadow", "canary"]
