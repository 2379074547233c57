"""The scripted server's answers: chat completions, completions, responses, whole or as the events of a stream."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Json: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class ScriptedToolCall:
    """A tool call in an answer.

    Attributes:
        name: the tool.
        arguments: JSON text.
    """

    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the server.

    Attributes:
        text: of the message; with n > 1, choices i > 0 append their number.
        tool_calls: of the message; its text is then empty.
        status: an HTTP status of 400 or more is sent as an error with `text` as its message.
        delay_s: seconds to wait before answering.
        cut: whether to close the connection in the middle of the body.
    """

    text: str = ""
    tool_calls: Sequence[ScriptedToolCall] = ()
    status: int = 200
    delay_s: float = 0.0
    cut: bool = False


# Called with the request's body and how many times the identical body was seen before.
Script: TypeAlias = Callable[[Mapping[str, Json], int], Reply]

_AGENT: Final = re.compile(r"You are ([\w-]+)")
_DIRECTIVE: Final = re.compile(r"^\s*(call|fail|wait|cut|say)\b[ ]*(.*?)\s*$", re.MULTILINE)


def agent_of(body: Mapping[str, Json]) -> str | None:
    """Return the name of the calling agent, from ``You are NAME`` in its instructions."""
    texts = [str(body.get("instructions") or ""), str(body.get("prompt") or "")]
    texts += [text for role, text in _turns(body) if role in {"system", "developer"}]
    found = _AGENT.search("\n".join(texts))
    return found[1] if found else None


def tool_results(body: Mapping[str, Json]) -> dict[str, str]:
    """Return the tool results in a request, by call id."""
    results = {}
    for message in _messages(body):
        if message.get("role") == "tool":
            results[str(message.get("tool_call_id"))] = _text(message.get("content"))
        elif message.get("type") == "function_call_output":
            results[str(message.get("call_id"))] = _text(message.get("output"))
    return results


def follow(body: Mapping[str, Json], seen: int) -> Reply:
    """Return the reply that the user's last message directs, one directive per line; by default in the agent's name.

    ``call NAME {json}`` calls a tool, several lines call several at once, and once their results are there the answer
    quotes them. ``fail STATUS TIMES`` fails that many times for the same request. ``wait SECONDS``; ``cut``;
    ``say TEXT``.
    """
    user = [index for index, (role, _) in enumerate(_turns(body)) if role == "user"]
    text = _turns(body)[user[-1]][1] if user else ""
    directives = _DIRECTIVE.findall(text)
    of = {verb: rest for verb, rest in directives}  # noqa: C416 - the last one of each kind counts
    if "fail" in of:
        status, times = (int(word) for word in of["fail"].split())
        if seen < times:
            return Reply(f"fails {seen + 1} of {times}", status=status)
    answered = _results_after(body, text)
    calls = [ScriptedToolCall(*rest.split(" ", 1)) for verb, rest in directives if verb == "call"]
    if calls and not answered:
        return Reply(tool_calls=calls)
    said = of.get("say") or f"{agent_of(body) or 'nobody'} answers {' '.join(text.split())[:40]!r}"
    said += "".join(f" [{result}]" for result in answered)
    return Reply(said, delay_s=float(of.get("wait", 0)), cut="cut" in of)


def _results_after(body: Mapping[str, Json], text: str) -> list[str]:
    """Return the tool results after the last user message, which has this text."""
    results: list[str] = []
    for message in _messages(body):
        if message.get("role") == "user":
            results = []
        elif message.get("role") == "tool" or message.get("type") == "function_call_output":
            results.append(_text(message.get("content") or message.get("output")))
    return results if text else []


def _messages(body: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    given = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [message for message in given or () if isinstance(message, Mapping)]


def _turns(body: Mapping[str, Json]) -> list[tuple[str, str]]:
    return [(str(message.get("role")), _text(message.get("content"))) for message in _messages(body)]


def _text(content: Json) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def tokens_of(text: str) -> list[int]:
    """Return token ids of a text by our own tokenizer: one for each word with the spaces after it."""
    return [zlib.crc32(word.encode()) % 50_000 for word in words_of(text)]


def words_of(text: str) -> list[str]:
    """Split a text into words with the spaces after them."""
    return re.findall(r"\s*\S+\s*", text)


def answer(endpoint: str, body: Mapping[str, Json], reply: Reply, seen: int) -> dict[str, Json]:
    """Return the whole response; its id depends only on the request, so that runs can be compared.

    A streamed completion has no usage unless requested.
    """
    key = hashlib.sha1(json.dumps([body, seen], sort_keys=True).encode(), usedforsecurity=False).hexdigest()[:16]
    if endpoint == "/responses":
        return _response(body, reply, key)
    whole = _completion(body, reply, key) if endpoint == "/chat/completions" else _text_completion(body, reply, key)
    if body.get("stream") and not _wants_usage(body):
        del whole["usage"]
    return whole


def pieces(endpoint: str, body: Mapping[str, Json], whole: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    """Split a whole response into the events of a stream."""
    if endpoint == "/responses":
        return _response_events(whole)
    return _chunks(body, whole) if endpoint == "/chat/completions" else _text_chunks(body, whole)


def _completion(body: Mapping[str, Json], reply: Reply, key: str) -> dict[str, Json]:
    prompt = tokens_of(json.dumps(body.get("messages")))
    choices = [_choice(reply, index, key, logprobs=bool(body.get("logprobs"))) for index in range(body.get("n") or 1)]
    count = sum(len(choice["token_ids"]) for choice in choices)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    return {
        "id": f"chatcmpl-{key}",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": body.get("model"),
        "choices": choices,
        "usage": usage,
        "prompt_token_ids": prompt,
    }


def _choice(reply: Reply, index: int, key: str, *, logprobs: bool) -> dict[str, Json]:
    text = reply.text if index == 0 else f"{reply.text} (choice {index})"
    message: dict[str, Json] = {"role": "assistant", "content": text}
    if reply.tool_calls:
        calls = [
            {"id": _call_id(key, index, i), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in enumerate(reply.tool_calls)
        ]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        text = " ".join(c.arguments for c in reply.tool_calls)
    choice = {
        "index": index,
        "message": message,
        "finish_reason": "tool_calls" if reply.tool_calls else "stop",
        "token_ids": tokens_of(text),
    }
    if logprobs:
        content: list[dict[str, Json]] = [
            {"token": word, "logprob": -0.25 * number, "bytes": None, "top_logprobs": []}
            for number, word in enumerate(words_of(text), 1)
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    return choice


def _call_id(key: str, choice: int, index: int) -> str:
    return f"call_{key[:8]}_{choice}_{index}"


def _chunks(body: Mapping[str, Json], whole: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    counted = _wants_usage(body)
    base = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    base |= {"usage": None} if counted else {}
    for choice in whole["choices"]:
        first = {**_part(choice, {"role": "assistant"}), "prompt_token_ids": whole["prompt_token_ids"]}
        yield {**base, **first}
    longest = max(len(choice["token_ids"]) for choice in whole["choices"])
    deltas = [_deltas(choice["message"]) for choice in whole["choices"]]
    for step in range(longest):  # the choices alternate, as on a real server
        for choice, grown in zip(whole["choices"], deltas, strict=True):
            if step < len(choice["token_ids"]):
                yield {**base, **_part(choice, grown[step], step)}
    for choice in whole["choices"]:
        yield {**base, **_part(choice, {}, finish=choice["finish_reason"])}
    if counted:
        yield {**base, "choices": [], "usage": whole["usage"]}


def _wants_usage(body: Mapping[str, Json]) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


def _part(
    choice: Mapping[str, Json], delta: Json, step: int | None = None, finish: str | None = None
) -> dict[str, Json]:
    part = {"index": choice["index"], "delta": delta, "finish_reason": finish}
    if step is not None:
        part["token_ids"] = [choice["token_ids"][step]]
        if "logprobs" in choice:
            part["logprobs"] = {"content": [choice["logprobs"]["content"][step]], "refusal": None}
    return {"choices": [part]}


def _deltas(message: Mapping[str, Json]) -> list[Json]:
    """Return what each token adds to the message: a word, or one word of the arguments of a tool call."""
    if message["content"] is not None:
        return [{"content": word} for word in words_of(message["content"])]
    deltas: list[Json] = []
    for index, call in enumerate(message["tool_calls"]):
        for step, word in enumerate(words_of(call["function"]["arguments"])):
            opening = {"id": call["id"], "type": "function"} if step == 0 else {}
            name = {"name": call["function"]["name"]} if step == 0 else {}
            deltas.append({"tool_calls": [{"index": index, **opening, "function": {**name, "arguments": word}}]})
    return deltas


def _text_completion(body: Mapping[str, Json], reply: Reply, key: str) -> dict[str, Json]:
    """Return a completion in vLLM's format: token ids inside the choices, log-probabilities as flat lists."""
    chat = _completion({**body, "messages": body.get("prompt")}, reply, key)
    prompt = chat.pop("prompt_token_ids")
    choices = [
        {
            "index": choice["index"],
            "text": choice["message"]["content"],
            "logprobs": None if body.get("logprobs") is None else _flat(choice["message"]["content"], body["logprobs"]),
            "finish_reason": choice["finish_reason"],
            "token_ids": choice["token_ids"],
            "prompt_token_ids": prompt,
        }
        for choice in chat["choices"]
    ]
    return {**chat, "id": f"cmpl-{key}", "object": "text_completion", "choices": choices}


def _flat(text: str, top: int) -> dict[str, Json]:
    words = words_of(text)
    logprobs = [-0.25 * number for number in range(1, len(words) + 1)]
    return {
        "tokens": words,
        "token_logprobs": logprobs,
        "top_logprobs": [{word: logprob} for word, logprob in zip(words, logprobs, strict=True)] if top else None,
        "text_offset": [sum(len(word) for word in words[:at]) for at in range(len(words))],
    }


def _text_chunks(body: Mapping[str, Json], whole: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    base = {key: whole[key] for key in ("id", "object", "created", "model")}
    base |= {"usage": None} if _wants_usage(body) else {}
    longest = max(len(choice["token_ids"]) for choice in whole["choices"])
    words = [words_of(choice["text"]) for choice in whole["choices"]]
    for step in range(longest):
        for choice, text in zip(whole["choices"], words, strict=True):
            if step < len(choice["token_ids"]):
                yield {**base, "choices": [_text_part(choice, text[step], step)]}
    if _wants_usage(body):
        yield {**base, "choices": [], "usage": whole["usage"]}


def _text_part(choice: Mapping[str, Json], word: str, step: int) -> dict[str, Json]:
    last = step == len(choice["token_ids"]) - 1
    flat = choice["logprobs"]
    part = {
        "index": choice["index"],
        "text": word,
        "logprobs": flat and {name: values and [values[step]] for name, values in flat.items()},
        "finish_reason": choice["finish_reason"] if last else None,
        "token_ids": [choice["token_ids"][step]],
    }
    return {**part, "prompt_token_ids": choice["prompt_token_ids"]} if step == 0 else part


def _response(body: Mapping[str, Json], reply: Reply, key: str) -> dict[str, Json]:
    prompt = len(tokens_of(json.dumps(body.get("input"))))
    output: list[dict[str, Json]]
    if reply.tool_calls:
        output = [
            {
                "type": "function_call",
                "id": f"fc_{key}_{i}",
                "call_id": _call_id(key, 0, i),
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            for i, call in enumerate(reply.tool_calls)
        ]
    else:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        output = [
            {"type": "message", "id": f"msg_{key}", "role": "assistant", "status": "completed", "content": [part]}
        ]
    count = len(tokens_of(reply.text))
    return {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": 1_790_000_000,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "model": body.get("model"),
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + count,
        },
    }


def _response_events(whole: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    for number, event in enumerate(_response_steps(whole)):
        yield {**event, "sequence_number": number}


def _response_steps(whole: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            yield from _message_steps(item, place)
        else:
            yield {"type": "response.output_item.added", **place, "item": {**item, "arguments": ""}}
            for word in words_of(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **place, "delta": word}
            yield {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": dict(whole)}


def _message_steps(item: Mapping[str, Json], place: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    part = item["content"][0]
    here = {**place, "content_index": 0}
    yield {
        "type": "response.output_item.added",
        "output_index": place["output_index"],
        "item": {**item, "content": [], "status": "in_progress"},
    }
    yield {"type": "response.content_part.added", **here, "part": {**part, "text": ""}}
    for word in words_of(part["text"]):
        yield {"type": "response.output_text.delta", **here, "delta": word, "logprobs": []}
    yield {"type": "response.output_text.done", **here, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **here, "part": part}
