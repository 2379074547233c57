"""A real vLLM serves the architectures of the table of families: tokens on record, and what transformers says of them.

One start of vLLM for each, so that it is run before a version.
"""

from __future__ import annotations

import pytest
import transformers

from lightning_trainer.reasons import continuation as reasons
from lightning_trainer.reasons.continuation import ContinuationReason
from support.gateway.vllm import USER, asker, exactly, logprobs_of, unbroken, vllm_serving
from support.models.family_models import SERVED_BY_VLLM, make_family_model
from support.models.model_families import all_families

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


@pytest.mark.parametrize("name", SERVED_BY_VLLM)
def test_a_conversation_is_recorded_token_for_token(tmp_path, name):
    family = next((family for family in all_families() if family.name == name), None)
    if family is None or not hasattr(transformers, f"{family.architecture}ForCausalLM"):
        pytest.skip("trl's templates, or the architecture, are not here")
    model, messages = make_family_model(tmp_path / "model", family), list(USER)
    with (
        vllm_serving(model, tmp_path, "processed_logprobs") as url,
        exactly(model, url, tmp_path) as front,
        asker(front, "talk") as ask,
    ):
        for _ in range(3):
            (message,) = ask(messages, max_tokens=12, temperature=0.8)
            messages += [message, *USER]
        calls, (rows, _) = ask.calls(), ask.rows()
    assert calls[0].sampling[reasons.CONTINUATION] == ContinuationReason.BEGINS
    if all(call.sampling[reasons.CONTINUATION] == ContinuationReason.JOINED for call in calls[1:]):
        unbroken(calls)
    for call in calls:
        assert list(call.choices[0].logprobs) == pytest.approx(logprobs_of(model, call, 0.8), abs=2e-3)
    assert sum(int(row.mask.sum()) for row in rows) == sum(len(call.choices[0].token_ids) for call in calls)
