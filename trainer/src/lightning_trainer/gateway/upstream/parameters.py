"""The fields of a request that are sent on to a vLLM or SGLang server: all those whose effect is known.

Some of them make the server sample from another distribution than the policy's. Such calls are answered, and left out
of training with the reason: see `lightning_trainer.rl.steered`. Unknown fields could do the same unnoticed: they are
rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_trainer.gateway.http.errors import bad_request
from lightning_trainer.gateway.request.chat_request import BOOKKEEPING
from lightning_trainer.gateway.upstream.dialects import Dialect

_OPENAI: Final = frozenset({
    "model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
    "n", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed",
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format",
    "reasoning_effort", "verbosity", "modalities", "prediction", "suffix", "echo", "best_of",
})  # fmt: skip
_SERVERS: Final = frozenset({  # vLLM and SGLang
    "top_k", "min_p", "repetition_penalty", "min_tokens", "length_penalty", "use_beam_search", "ignore_eos",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "prompt_logprobs", "add_special_tokens", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs",
    "allowed_token_ids", "bad_words", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structural_tag", "guided_decoding_backend", "guided_whitespace_pattern", "regex", "ebnf",
    "include_reasoning", "separate_reasoning", "stream_reasoning", "thinking", "thinking_token_budget",
    "return_token_ids", "return_tokens_as_token_ids", "no_stop_trim",
})  # fmt: skip
# Fields that affect other attempts too, or run as a program in the server: one attempt's key may not set them.
_OWNERS: Final = frozenset({
    "priority", "cache_salt", "request_id", "rid", "logits_processors", "custom_logit_processor", "custom_params",
    "chat_template", "documents", "mm_processor_kwargs",
})  # fmt: skip
_KNOWN: Final = _OPENAI | _SERVERS | _OWNERS | BOOKKEEPING


def refuse_unknown(dialect: Dialect, request: Mapping[str, Any]) -> None:
    """Reject an attempt's request with fields whose effect on the answer is unknown, or that affect others.

    Raises:
        Refusal: names the field.
    """
    for name in sorted(_OWNERS & request.keys()):
        if request[name] not in (None, [], {}):
            raise bad_request(
                f"parameter {name!r} is for the owner of the model's server, not for an attempt. Leave it out.",
                "unsupported_parameter",
            )
    if dialect == "plain":  # it sends no tokens, so nothing of it is used for training
        return
    for name, value in request.items():
        if value is not None and name not in _KNOWN:
            raise bad_request(
                f"parameter {name!r} is not known here, so it is not sent on in training. Leave it out.",
                "unsupported_parameter",
            )


def without_bookkeeping(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request without fields for a vendor's accounts, caches and routing."""
    return {name: value for name, value in request.items() if name not in BOOKKEEPING}
