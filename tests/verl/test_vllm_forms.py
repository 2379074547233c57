"""What an answer must be, as vLLM's two backends read it: whatever they allow is read here as what was asked for."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

pytest.importorskip("vllm")

import llguidance
import llguidance.torch
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from lightning_trainer.gateway.formats.reader import Dialect, parse
from lightning_trainer.gateway.formats.table import by_name
from lightning_trainer.gateway.request.constraints import FORMS, constraint_of
from support.models.tiny import make_tiny_model

LEAF = st.sampled_from([
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["a\nb", "ü", 3]},
    {"const": {"x": [1, "\""]}},
    {"type": "string", "maxLength": 2},
])  # fmt: skip


def _objects(properties):
    return st.builds(
        lambda fields, needed: {
            "type": "object",
            "properties": fields,
            "required": sorted(fields)[:needed],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "b c", 'é"']), properties, max_size=2),
        st.integers(0, 2),
    )


def _wider(inner):
    lists = st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
    return lists | _objects(inner) | st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)


SCHEMAS = _objects(st.recursive(LEAF, _wider, max_leaves=4))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def by_xgrammar(constraint, tokenizer):
    """Return a matcher's allowed tokens, and what takes one."""
    read = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    tag = constraint.structured_outputs("structural_tag")["structural_tag"]
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(read).compile_structural_tag(tag))
    mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))

    def allowed():
        matcher.fill_next_token_bitmask(mask)
        return _tokens(mask, len(tokenizer))

    return allowed, matcher.accept_token


def by_guidance(constraint, tokenizer):
    lark = constraint.structured_outputs("grammar")["grammar"]
    matcher = llguidance.LLMatcher(from_tokenizer(tokenizer), llguidance.grammar_from("grammar", lark))
    assert not matcher.get_error()
    mask = llguidance.torch.allocate_token_bitmask(1, len(tokenizer))

    def allowed():
        llguidance.torch.fill_next_token_bitmask(matcher, mask)
        return _tokens(mask, len(tokenizer))

    return allowed, matcher.consume_token


def _tokens(mask: torch.Tensor, vocabulary: int) -> list[int]:
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocabulary]).tolist()


def written(backend, constraint, tokenizer, rng):
    """Write an answer of tokens that are drawn freely from those allowed; end it where it may end, one time in five."""
    allowed, take = backend(constraint, tokenizer)
    # xgrammar 0.2.8 lets control characters stand in a string that has a maxLength.
    unwritten = {tokenizer.eos_token_id, *tokenizer("".join(map(chr, range(32))).replace("\n", "")).input_ids}
    ids = []
    while len(ids) < 5000:
        choices = allowed()
        end = tokenizer.eos_token_id in choices
        if end and (len(choices) == 1 or rng.random() < 0.2):
            return tokenizer.decode(ids)
        ids.append(rng.choice([token for token in choices if token not in unwritten]))
        assert take(ids[-1])
    raise AssertionError(tokenizer.decode(ids))


@pytest.mark.parametrize("backend", [by_xgrammar, by_guidance])
@settings(max_examples=40, deadline=None)
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=3), one_call=st.booleans(), also=st.none() | SCHEMAS, seed=...)
def test_what_a_backend_allows_is_what_was_asked_for(backend, tokenizer, schemas, one_call, also, seed: int):
    names = ["add", 'say "hi"', "später"][: len(schemas)]
    tools = [{"function": {"name": name, "parameters": s}} for name, s in zip(names, schemas, strict=True)]
    shape = None if also is None else {"type": "json_schema", "json_schema": {"name": "x", "schema": also}}
    choice = "required" if also is None else "auto"
    constraint = constraint_of(choice, tools, shape, one_call=one_call)
    text = written(backend, constraint, tokenizer, random.Random(seed))
    answer = parse(Dialect(by_name("hermes")), text, tools)
    if also is not None and not answer.tool_calls:
        Draft202012Validator(also).validate(json.loads(text))
        return
    assert answer.content is None
    assert 1 <= len(answer.tool_calls) <= (1 if one_call else 8)
    for call in answer.tool_calls:
        schema = schemas[names.index(call["function"]["name"])]
        Draft202012Validator(schema).validate(json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize("form", FORMS)
def test_no_form_is_taken_by_the_other_backend_or_changed_for_it(form):
    """Should one of them take both one day, the other form has no use any more."""
    constraint = constraint_of("required", [{"function": {"name": "add"}}], {"type": "json_object"}, one_call=False)
    told = constraint.structured_outputs(form)
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(**told))
    takes = {"structural_tag": validate_xgrammar_grammar, "grammar": validate_guidance_grammar}
    takes.pop(form)(sampling)
    (other,) = takes.values()
    with pytest.raises((ValueError, KeyError)):
        other(sampling)
    assert getattr(sampling.structured_outputs, form) == told[form]
