"""`--system-messages merge` on templates that take one leading system message, or none, and alternating roles."""

from __future__ import annotations

import shutil

import httpx
import jinja2
import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.cli.servers.upstreams import read_upstreams
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.doctor import examine_template
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.models.merged_messages import merge_system_messages
from support.fakes import ByteTokenizer, FakeEngine, served

STRICT = """
{%- if messages[0].role == 'system' %}{{ messages[0].content }}|{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- for message in loop_messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + message.role + ':' + message.content + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + STRICT


class Tokenizer(ByteTokenizer):
    def apply_chat_template(self, conversation, tools=None, *, chat_template=None, add_generation_prompt=False, **more):
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        template = environment.from_string(chat_template or self.chat_template)
        return template.render(messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt)


def _raise(message):
    raise jinja2.TemplateError(message)


def said(*messages):
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text} for text in messages]


FIRST = said("s1", "d2", "u3", "u4")
LATER = [*FIRST, *said("a5", "s6", "u7")]


@pytest.mark.parametrize("template", [STRICT, NO_SYSTEM])
def test_messages_are_merged_in_their_order_and_a_longer_conversation_continues_a_shorter_one(template):
    tokenizer = Tokenizer(template)
    merge_system_messages(tokenizer)
    merge_system_messages(tokenizer)  # again is nothing more
    chat = ChatFormat(tokenizer)
    end = "<|im_end|>"
    begin = "s1\n\nd2|<|im_start|>user:u3" if template == STRICT else "<|im_start|>user:s1\n\nd2\n\nu3"
    first = f"{begin}\n\nu4{end}"
    assert chat.plain.shown(chat.render(FIRST, (), prompt=False)) == first
    later = f"{first}<|im_start|>assistant:a5{end}<|im_start|>user:s6\n\nu7{end}"
    assert chat.plain.shown(chat.render(LATER, (), prompt=False)) == later
    assert [chat.merges(messages) for messages in (FIRST, LATER, said("s1", "u2", "a3"))] == [True, True, False]
    assert examine_template(tokenizer).several_system == "merged"


@pytest.mark.parametrize("template", [STRICT, NO_SYSTEM])
def test_a_refusal_and_the_doctor_suggest_it_where_it_helps(template):
    chat = ChatFormat(tokenizer := Tokenizer(template))
    with pytest.raises(Refusal, match=r"Start with --system-messages merge\."):
        chat.render(FIRST, ())
    with pytest.raises(Refusal) as refused:
        chat.render(said("u1", "a2", "a3"), ())
    assert "--system-messages" not in str(refused.value), "it would not help"
    assert "--system-messages merge" in examine_template(tokenizer).several_system
    assert tokenizer.chat_template == template


def test_a_template_that_refuses_merged_messages_as_well_is_an_error():
    with pytest.raises(ConfigError, match="does not help"):
        merge_system_messages(Tokenizer("{{ raise_exception('never') }}"))


def test_a_template_that_takes_any_order_is_told():
    any_order = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert examine_template(Tokenizer(any_order)).several_system == "taken"


def test_merging_is_recorded_with_the_calls_that_it_changes(tmp_path):
    merge_system_messages(tokenizer := Tokenizer(STRICT))
    with served(tmp_path, FakeEngine(tokenizer=tokenizer)) as server:
        headers = {"authorization": f"Bearer {server.key('a')}"}
        for messages in (FIRST, said("s1", "u2")):
            body = {"model": "policy", "messages": messages}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
        calls = server.calls("a")
    assert [call.sampling.get("system_messages") for call in calls] == ["merge", None]
    assert calls[0].request["messages"] == FIRST, "the request is recorded as it was sent"


def test_a_server_merges_for_the_models_whose_tokenizer_is_named(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "strict")
    (folder / "chat_template.jinja").write_text(STRICT)

    def render(system_messages):
        named = {"timeout_s": None, "keys": (), "adapters": None, "tool_formats": ()}
        tokenizers = [f"a={folder}"]
        [upstream] = read_upstreams(
            ["a=http://127.0.0.1:9"], tokenizers=tokenizers, system_messages=system_messages, **named
        )
        return ChatFormat(upstream.tokenizer).render(LATER, (), prompt=False)

    assert render("merge")
    with pytest.raises(Refusal, match=r"Start with --system-messages merge\."):
        render(None)
