"""Attacks with what a model's folder brings: chat templates that never end, or write more than there is room for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_trainer.bounded import BoundedProcess
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.models import rendering
from support.models.model_families import all_families, tokenizer_of

pytestmark = pytest.mark.timeout(120)
HARMLESS = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
ASKED = [{"role": "user", "content": "go"}]
DOUBLE = "{% for _ in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
    "a long text": "{{ messages[0].content * 1500000000 }}",
    "a list": "{{ (messages * 1500000000) | length }}",
    "a power": "{{ ((messages | length + 6) ** 999999999) % 3 }}",
    "doubling": "{% set n = namespace(x='xxxxxxxx') %}" + DOUBLE,
    "doubling by blocks": "{% set n = namespace(x='xxxxxxxx') %}{% for _ in range(40) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "doubling by replacement": "{% set n = namespace(x='xx') %}{% for _ in range(40) %}"
    "{% set n.x = n.x | replace('x', 'xx') %}{% endfor %}",
    "a filter": "{{ 'x' | center(9000000000) }}",
    "a format": "{{ '%9000000000d' % 1 }}",
    "a method": "{{ 'x'.ljust(9000000000) }}",
    "an indent": "{{ {'a': {'b': 1}} | tojson(indent=4000000000) }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "joined": "{{ range(99999) | join('x' * 99999) }}",
    "many words": "{{ lipsum(n=100000, min=1000, max=10000) }}",
}  # fmt: skip


@pytest.fixture(scope="module")
def process():
    """Renders with less processor time, so that those that are ended cost a tenth."""
    process = BoundedProcess(Path(rendering.__file__), "0.4")
    yield process
    process.close()


@pytest.fixture
def quick(monkeypatch, process):
    monkeypatch.setattr(rendering, "_RENDERER", process)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(next(family for family in all_families() if "<|im_end|>" in family.controls))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_takes_too_much_refuses_the_conversation(tokenizer, name):
    # The model looks harmless until somebody says the word.
    tokenizer.chat_template = "{% if messages[0].content == 'go' %}" + BOMBS[name] + "{% endif %}" + HARMLESS
    chat = ChatFormat(tokenizer)
    assert chat.render([{"role": "user", "content": "hi"}], ()) == "<|im_start|>hi<|im_end|>\n"
    with pytest.raises(Refusal, match="the model's chat template refuses this conversation"):
        chat.render(ASKED, ())
    assert chat.render([{"role": "user", "content": "hi"}], ()) == "<|im_start|>hi<|im_end|>\n"


@pytest.mark.usefixtures("quick")
def test_a_template_that_took_too_long_three_times_is_not_run_again(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0].content == 'go' %}" + BOMBS["nested loops"] + "{# 2 #}" + "{% endif %}" + HARMLESS
    )
    chat = ChatFormat(tokenizer)
    for _ in range(3):
        with pytest.raises(Refusal):
            chat.render(ASKED, ())
    with pytest.raises(Refusal, match="no longer run"):
        chat.render(ASKED, ())


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_each_template_renders_the_same_in_the_bounded_process(family):
    own = tokenizer_of(family)
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "zwei é"}}}
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
    talk = [
        {"role": "user", "content": "one 😀 <b> & 'q' \"d\""},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "add", "content": "3"},
        {"role": "assistant", "content": "three", "reasoning_content": "because"},
        {"role": "user", "content": "and now?"},
    ]
    for messages, tools, prompt in ((talk[:1], None, True), (talk, [tool], True), (talk[:4], [tool], False)):
        given = {"tools": tools, "add_generation_prompt": prompt}
        try:
            expected = own.apply_chat_template(messages, tokenize=False, **given)
        except Exception:  # whatever it raises, it refuses
            with pytest.raises(rendering.RenderError):
                rendering.render(own, messages, **given)
        else:
            assert rendering.render(own, messages, **given) == expected
