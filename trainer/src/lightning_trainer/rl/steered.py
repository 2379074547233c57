"""Calls that were not sampled from the policy alone: parameters that shape, restrict or force the samples.

The recorded log-probabilities are the policy's. A token that a grammar forces has one although no choice was made; a
token sampled among the likeliest is sampled more often than by the policy. Trained as plain samples, such tokens teach
what nothing decided. The embedded engine reports which tokens these are, and only they are left out of the loss; for
other engines' calls this is unknown, so the whole call is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_spans.schema.calls import Call
from lightning_spans.schema.transitions import Transition

STEERED: Final = "steered"  # in a call's sampling: positions of such tokens by the number of the choice, if known
_FREE: Final[Mapping[str, tuple[Any, ...]]] = {  # parameters, and their values that change nothing
    "top_p": (1, 1.0), "top_k": (0, -1), "min_p": (0, 0.0), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1, 1.0), "logit_bias": ({},), "grammar": (), "structured_outputs": ({},),
    "response_format": ({"type": "text"}, "text"), "tool_choice": ("auto", "none"), "min_tokens": (0,),
    "ignore_eos": (False,), "allowed_token_ids": (), "bad_words": ([],), "logits_processors": ([],),
    "custom_logit_processor": (), "use_beam_search": (False,), "best_of": (1,), "length_penalty": (1, 1.0),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structural_tag": (),
    "regex": (), "ebnf": (), "thinking_token_budget": (), "prediction": (), "suffix": ("",),
}  # fmt: skip


def steering(call: Call | Transition) -> str | None:
    """Name the first parameter by which a call was sampled from another distribution than the policy's; None: none."""
    # Parameters that the gateway left out of the request are in the sampling as requested, but were not in force.
    asked = {n: call.request[n] for n in _FREE if n in call.request and f"{n}_asked" not in call.sampling}
    in_force = {**asked, **{name: call.sampling[name] for name in _FREE if name in call.sampling}}
    return next((name for name, value in in_force.items() if value is not None and value not in _FREE[name]), None)


def steered_places(call: Transition) -> list[int] | None:
    """Return the positions of tokens in the response that are not samples of the policy; None if they are unknown."""
    told = call.sampling.get(STEERED)
    if not isinstance(told, Mapping):
        return None if steering(call) is not None else []
    return [int(place) for place in told.get(str(call.choice), [])]
