"""Parses a chat-completion request once and completely: every parameter does what it says or is rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final

from lightning_trainer.gateway.http.errors import bad_request
from lightning_trainer.gateway.request.constraints import Constraint, constraint_of
from lightning_trainer.gateway.request.fields import flag, format_value, number, read_list, whole, wrong

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 64  # each is searched after each token, on the event loop
MAX_STOP_CHARACTERS: Final = 1000  # of each

# These change a vendor's bookkeeping, caching and routing, never the answer.
BOOKKEEPING: Final = frozenset({
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "safety_identifier",
    "provider", "route", "models", "usage", "session_id", "trace", "cache_control",  # OpenRouter
    "litellm_metadata", "litellm_session_id", "litellm_trace_id", "tags", "fallbacks", "num_retries", "timeout",
    "cache", "caching",  # LiteLLM's proxy
})  # fmt: skip
_READ: Final = frozenset({
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stream", "stream_options", "stop",
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "return_token_ids",
    "prompt", "reasoning_effort", "chat_template_kwargs", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "response_format", "verbosity",
})  # fmt: skip
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {  # known parameters, and their values that change nothing
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "transforms": ([],),
    "plugins": ([],),
    "include_reasoning": (True,),
    "enable_search": (False,),
    "result_format": ("message",),
    "safe_prompt": (False,),
}
_OTHERWISE: Final = {  # parameters of vendors, and how the same is requested here
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "thinking": "reasoning_effort or chat_template_kwargs",
    "reasoning": "reasoning_effort",
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The content of a request.

    Attributes:
        model: the requested model.
        messages: as received, with roles and shapes checked; empty if there is a `prompt`.
        prompt: a text or token ids to continue without a chat template; None: there are messages.
        tools: function tools, as received; empty if `tool_choice` is ``none``.
        one_call: use only the first tool call of an answer (``parallel_tool_calls: false``).
        n: number of answers.
        stream: send chunks.
        include_usage: end the stream with a chunk of token counts.
        logprobs: send log-probabilities of the tokens.
        token_ids: send token ids, as vLLM does (``return_token_ids``).
        max_tokens: most tokens of one answer; None: as many as the context allows.
        temperature: None if not given.
        top_p: 1 if not given.
        top_k: 0, keep all, if not given.
        stop: strings that end an answer.
        seed: None if not given.
        others: fields of `Sampling` that not every engine supports, if they are not neutral.
        switches: variables for the chat template, such as enable_thinking.
        effort: reasoning effort, in OpenAI's words; None if not given.
        verbosity: length of the answer, likewise; no model here gets it.
        constraint: the answer's required form, of which `others` has the grammar; None: any.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    prompt: str | tuple[int, ...] | None
    tools: tuple[Mapping[str, Any], ...]
    one_call: bool
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    max_tokens: int | None
    temperature: float | None
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    seed: int | None
    others: Mapping[str, Any]
    switches: Mapping[str, Any]
    effort: str | None
    verbosity: str | None
    constraint: Constraint | None


def read_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Parse the body of ``POST /v1/chat/completions``.

    Raises:
        Refusal: a parameter is malformed, or would change the answer in a way that this engine does not support.
    """
    _refuse_others(body)
    tools = _tools(body)
    one_call = not flag(body, "parallel_tool_calls", default=True)
    constraint = constraint_of(body.get("tool_choice"), tools, body.get("response_format"), one_call=one_call)
    longest = body.get("max_completion_tokens")
    prompt = body.get("prompt")
    return ChatRequest(
        model=_model(body),
        messages=_messages(body.get("messages")) if prompt is None else (),
        prompt=tuple(prompt) if isinstance(prompt, list) else prompt,
        tools=() if body.get("tool_choice") == "none" else tools,
        one_call=one_call,
        n=whole(body, "n", 1, low=1, high=MAX_CHOICES) or 1,
        stream=flag(body, "stream"),
        include_usage=_include_usage(body),
        logprobs=flag(body, "logprobs"),
        token_ids=flag(body, "return_token_ids"),
        max_tokens=whole(body, "max_tokens" if longest is None else "max_completion_tokens", None, low=1),
        temperature=number(body, "temperature", None, low=0.0, high=100.0),
        top_p=_top_p(body),
        top_k=max(0, whole(body, "top_k", 0, low=-1) or 0),  # vLLM writes -1 for all
        stop=_stop(body.get("stop")),
        seed=whole(body, "seed", None, low=-(2**63), high=2**64 - 1),
        others={**_adjustments(body), **({} if constraint is None else {"grammar": constraint.lark()})},
        switches=_switches(body.get("chat_template_kwargs")),
        effort=_word(body, "reasoning_effort"),
        verbosity=_word(body, "verbosity"),
        constraint=constraint,
    )


# Parameters that shape the sampling distribution, and that no program can depend on.
SHAPING: Final[Mapping[str, Any]] = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


def plainly(request: ChatRequest) -> tuple[ChatRequest, dict[str, Any]]:
    """Return a request that is sampled from the policy itself, and what was left out of it."""
    others = {name: value for name, value in request.others.items() if name not in SHAPING}
    plain = replace(request, top_p=1.0, top_k=0, others=others)
    asked = {"top_p": request.top_p, "top_k": request.top_k, **request.others}
    return plain, {name: asked[name] for name, value in SHAPING.items() if asked.get(name, value) != value}


def without_unable(request: ChatRequest, able: Set[str]) -> tuple[ChatRequest, dict[str, Any]]:
    """Return a request without the parameters of `SHAPING` that an engine does not support, and what was left out."""
    unable = {name: value for name, value in request.others.items() if name in SHAPING and name not in able}
    return replace(request, others={name: v for name, v in request.others.items() if name not in unable}), unable


def check_abilities(request: ChatRequest, able: Set[str]) -> None:
    """Reject what an engine does not support.

    Raises:
        Refusal: it lacks an ability that the request needs.
    """
    for name in sorted(request.others.keys() - able):
        if name == "grammar":
            raise bad_request(
                "response_format, or tool_choice other than 'auto' and 'none', needs constrained decoding, which this"
                " engine does not do. Leave it out, and check the answer.",
                "unsupported_parameter",
            )
        raise bad_request(
            f"{name}={format_value(request.others[name])} is not supported: this engine would not do it."
            f" Leave {name} out.",
            "unsupported_parameter",
        )


def _adjustments(body: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "min_p": number(body, "min_p", 0.0, low=0.0, high=1.0),
        "presence_penalty": number(body, "presence_penalty", 0.0, low=-2.0, high=2.0),
        "frequency_penalty": number(body, "frequency_penalty", 0.0, low=-2.0, high=2.0),
        "repetition_penalty": number(body, "repetition_penalty", 1.0, low=0.01, high=100.0),
        "logit_bias": _logit_bias(body.get("logit_bias") or {}),
    }
    return {name: value for name, value in found.items() if value and (name, value) != ("repetition_penalty", 1.0)}


_OURS: Final = frozenset({"messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "conversation"})


def _switches(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or value.keys() & _OURS:
        raise wrong("chat_template_kwargs", value, "an object of the chat template's own variables")
    return value


def _word(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(name, value, "a string, such as low, medium or high")
    return value


def _logit_bias(value: Any) -> dict[int, float]:
    """Parse biases by token id. As JSON keys, the ids are texts."""
    try:
        biases = {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        biases = {-1: 0.0}
    if any(token < 0 or not -100 <= bias <= 100 for token, bias in biases.items()):
        raise wrong("logit_bias", value, "an object of token ids, each with a number from -100 to 100")
    return biases


def _refuse_others(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _READ or name in BOOKKEEPING or value is None:
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            advice = f"Use {_OTHERWISE[name]} instead." if name in _OTHERWISE else "Leave it out."
            raise bad_request(f"parameter {name!r} is not known here. {advice}", "unsupported_parameter")
        if value not in neutral:
            if name == "top_logprobs" and body.get("prompt") is not None:  # `logprobs` of /v1/completions
                raise bad_request(
                    f"logprobs={format_value(value)} is not supported: only the sampled tokens' log-probabilities are"
                    " known here. Set logprobs to 0.",
                    "unsupported_parameter",
                )
            raise bad_request(
                f"{name}={format_value(value)} is not supported: this engine would not do it. Leave {name} out"
                f" or set it to {format_value(neutral[0])}.",
                "unsupported_parameter",
            )


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise wrong("model", model, "the name of a model, see GET /v1/models")
    return model


def _top_p(body: Mapping[str, Any]) -> float:
    value = number(body, "top_p", 1.0, low=0.0, high=1.0)
    if not value:
        raise wrong("top_p", body["top_p"], "above 0; use temperature 0 for the most likely token")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise wrong("stop", value, "a string or a list of strings, none of them empty")
    if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in texts):
        most = f"at most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} characters"
        raise wrong("stop", f"{len(texts)} texts of {sum(map(len, texts))} characters", most)
    return tuple(texts)


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise wrong("stream_options", options, 'an object such as {"include_usage": true}')
    if flag(options, "include_obfuscation"):
        raise bad_request("stream_options.include_obfuscation is not supported. Leave it out.", "unsupported_parameter")
    return flag(options, "include_usage")


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = read_list("tools", body.get("tools") or [])
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong("tools", tool, 'function tools: {"type": "function", "function": {"name": ...}}')
        if not isinstance(function.get("parameters"), dict | None):
            raise wrong("tools", tool, "tools whose parameters are a JSON schema")
    return tuple(tools)


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list with at least one message")
    for at, message in enumerate(value):
        _check_message(message, f"messages[{at}]")
    return tuple(value)


def _check_message(message: Any, where: str) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise wrong(f"{where}.role", role, "system, developer, user, assistant or tool")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            _check_part(part, f"{where}.content")
    elif not isinstance(content, str) and not (content is None and role == "assistant"):
        raise wrong(f"{where}.content", content, "a string or a list of text parts")
    for call in _calls(message, where):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"{where}.tool_calls", call, 'calls such as {"id": ..., "function": {"name", "arguments"}}')


def _calls(message: Mapping[str, Any], where: str) -> Sequence[Any]:
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or message["role"] != "assistant"):
        raise wrong(f"{where}.tool_calls", calls, "a list, on an assistant's message")
    if message.get("function_call") is not None:
        raise bad_request(
            f"{where}.function_call is the old form of tool_calls, which is not supported. Use tool_calls."
        )
    return calls or ()


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else part.get("refusal") if kind == "refusal" else None
    if not isinstance(text, str):
        raise bad_request(
            f"{where}: part {format_value(kind)} is not supported. This model reads only text.", "unsupported_content"
        )
