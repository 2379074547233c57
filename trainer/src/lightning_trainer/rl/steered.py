"""Calls that were not drawn from the policy alone: parameters that shape, restrict or force what is drawn.

The log-probabilities on record are the policy's. A token that a grammar forces has one, and no choice was made; a token
drawn among the likeliest is drawn more often than the policy would. Trained as plain samples, such tokens teach what
nobody decided. The embedded engine says which tokens these are, and they alone are left out of the loss; of other
engines' calls nobody knows, so the whole call is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_spans.schema.transitions import Transition

STEERED: Final = "steered"  # in a call's sampling: places of such tokens by the number of the choice, where known
_FREE: Final[Mapping[str, tuple[Any, ...]]] = {  # parameters, and their values that change nothing
    "top_p": (1, 1.0), "top_k": (0, -1), "min_p": (0, 0.0), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1, 1.0), "logit_bias": ({},), "grammar": (), "structured_outputs": ({},),
    "response_format": ({"type": "text"}, "text"), "tool_choice": ("auto", "none"), "min_tokens": (0,),
    "ignore_eos": (False,), "allowed_token_ids": (), "bad_words": ([],), "logits_processors": ([],),
    "custom_logit_processor": (), "use_beam_search": (False,), "best_of": (1,), "length_penalty": (1, 1.0),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structural_tag": (),
    "regex": (), "ebnf": (), "thinking_token_budget": (), "prediction": (), "suffix": ("",),
}  # fmt: skip


def steering(call: Transition) -> str | None:
    """Name the first parameter by which a call was drawn from another distribution than the policy's; None: none."""
    # What the gateway left out of the request stands in the sampling as asked, and was not in force.
    asked = {n: call.request[n] for n in _FREE if n in call.request and f"{n}_asked" not in call.sampling}
    in_force = {**asked, **{name: call.sampling[name] for name in _FREE if name in call.sampling}}
    return next((name for name, value in in_force.items() if value is not None and value not in _FREE[name]), None)


def steered_places(call: Transition) -> list[int] | None:
    """Return the places of tokens in the response that are no samples of the policy; None where nobody knows."""
    told = call.sampling.get(STEERED)
    if not isinstance(told, Mapping):
        return None if steering(call) is not None else []
    return [int(place) for place in told.get(str(call.choice), [])]
