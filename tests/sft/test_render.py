"""What is learned of a conversation: the answers alone, with the recorded tokens where they are this tokenizer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_trainer.gateway.engine import set_tool_format
from lightning_trainer.kits.sft.data import Example, conversation
from lightning_trainer.kits.sft.render import RenderedExample, Renderer, UnrenderableError
from support.fakes import HERMES_TEMPLATE, PLAIN_TEMPLATE, ByteTokenizer, FakeEngine

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
USER, DONE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}

CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CALLING = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "2"},
    DONE,
]


def renderer(template: str = HERMES_TEMPLATE, tool_format: str | None = None) -> Renderer:
    engine: Any = FakeEngine(tokenizer=ByteTokenizer(template))
    set_tool_format([engine], tool_format)
    learner: Any = SimpleNamespace(engine=engine, end_tokens=frozenset({257}))
    return Renderer.of(learner)


def parts(rendered: RenderedExample) -> list[tuple[str, bool]]:
    """Pieces of text, each with whether it is learned."""
    tokenizer, found = ByteTokenizer(), list[tuple[list[int], bool]]()
    for token, learned in zip(rendered.ids, rendered.learned, strict=True):
        if not found or found[-1][1] != learned:
            found.append(([], learned))
        found[-1][0].append(token)
    return [(tokenizer.decode(ids), learned) for ids, learned in found]


def line(*messages: dict[str, Any], **more: Any) -> Example:
    return conversation({"messages": list(messages), **more}, "here")


def test_answers_are_learned_with_the_end_of_their_turn_and_nothing_else() -> None:
    [rendered] = renderer().render(line(USER, DONE, {"role": "user", "content": "more"}, DONE))
    assert parts(rendered) == [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("hello<|im_end|>", True),
        ("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", False),
        ("hello<|im_end|>", True),
    ]


def test_only_the_answers_named_are_learned() -> None:
    [rendered] = renderer().render(line(USER, DONE, USER, {**DONE, "content": "mine"}, answers=[3]))
    assert [text for text, learned in parts(rendered) if learned] == ["mine<|im_end|>"]


def test_calls_of_tools_are_learned_as_the_template_writes_them() -> None:
    [rendered] = renderer().render(line(*CALLING, tools=[TOOL]))
    learned = [text for text, own in parts(rendered) if own]
    assert learned == ['<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>', "hello<|im_end|>"]
    with pytest.raises(UnrenderableError, match="no section for tools"):
        renderer(PLAIN_TEMPLATE).render(line(*CALLING, tools=[TOOL]))


def test_a_chosen_tool_format_is_the_one_of_the_learned_calls() -> None:
    called = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    before = HERMES_TEMPLATE.replace("'<tool_call>", "'I call <tool_call>")  # so that no format is detected
    with pytest.raises(UnrenderableError, match="--tool-format"):
        renderer(before).render(line(*CALLING, tools=[TOOL]))
    [rendered] = renderer(before, "hermes").render(line(*CALLING, tools=[TOOL]))
    assert [text for text, own in parts(rendered) if own] == [f"I call {called}", "hello<|im_end|>"]
    other = HERMES_TEMPLATE.replace("tool_call>", "functioncall>")
    written = {"role": "assistant", "content": called.removesuffix("<|im_end|>")}  # data that has calls as text
    [rendered] = renderer(other, "hermes").render(line(USER, written, USER, DONE, tools=[TOOL]))
    assert [text for text, own in parts(rendered) if own] == [called, "hello<|im_end|>"]
    with pytest.raises(UnrenderableError, match="does not write its tool calls in the format of --tool-format"):
        renderer(other, "hermes").render(line(*CALLING, tools=[TOOL]))


def test_text_of_a_control_token_in_a_message_ends_no_turn() -> None:
    said = {"role": "assistant", "content": "write <|im_end|> here"}
    [rendered] = renderer().render(line(USER, said))
    assert [text for text, learned in parts(rendered) if learned] == ["write <|im_end|> here<|im_end|>"]
    assert rendered.ids.count(257) == 2  # the user's turn and the answer's, and not what the answer speaks of


def test_a_template_that_writes_earlier_turns_anew_gives_a_row_for_each_answer() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if loop.last or m.role != 'assistant' "
        "else 'cut') + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    both = renderer(template).render(line(USER, DONE, USER, DONE))
    assert [[text for text, own in parts(each) if own] for each in both] == [["hello<|im_end|>"]] * 2
    assert "cut<|im_end|>" in parts(both[1])[0][0]


def test_a_thought_that_the_prompt_opens_is_not_learned() -> None:
    template = PLAIN_TEMPLATE.replace(
        "<|im_start|>assistant\n' }}{% endif", "<|im_start|>assistant\n<think>\n' }}{% endif"
    )
    assert template != PLAIN_TEMPLATE
    [rendered] = renderer(template).render(line(USER, {"role": "assistant", "content": "<think>\nhm</think>yes"}))
    assert parts(rendered)[1] == ("hm</think>yes<|im_end|>", True)
    [rendered] = renderer(template).render(line(USER, DONE))  # the data has no thought, so none is opened
    assert parts(rendered)[1] == ("hello<|im_end|>", True)


def test_a_template_without_an_end_of_turn_gets_one() -> None:
    said, opened = (
        "{{ m.role + ': ' + m.content + '\n' }}",
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    )
    template = f"{{% for m in messages %}}{said}{{% endfor %}}{opened}"
    [rendered] = renderer(template).render(line(USER, DONE))
    assert parts(rendered)[1] == ("hello\n<|im_end|>", True)


# Recorded tokens.


def recorded(ids: list[int], learned: slice, *messages: dict[str, Any]) -> Example:
    labels = [-100] * len(ids)
    labels[learned] = ids[learned]
    return conversation({"messages": list(messages), "input_ids": ids, "labels": labels}, "here")


def prompt(text: str = "hi") -> list[int]:
    return ByteTokenizer().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def test_recorded_tokens_are_taken_as_they_are() -> None:
    ids = [*prompt(), ByteTokenizer.merged, 257]  # "an" as one token, which encoding never gives
    [rendered] = renderer().render(recorded(ids, slice(-2, None), USER, {"role": "assistant", "content": "an"}))
    assert (rendered.ids, rendered.recorded) == (ids, True)
    assert rendered.learned == [False] * (len(ids) - 2) + [True, True]
    [rendered] = renderer().render(recorded(ids, slice(-2, None)))
    assert rendered.recorded


@pytest.mark.parametrize("ids", [[1000, 2, 3, 4], [*prompt("other"), 5, 257], [97, ByteTokenizer.merged, 5, 257]])
def test_tokens_of_another_tokenizer_are_written_anew_from_messages(ids: list[int]) -> None:
    [rendered] = renderer().render(recorded(ids, slice(-2, None), USER, DONE))
    assert (parts(rendered)[1], rendered.recorded) == (("hello<|im_end|>", True), False)


def test_tokens_of_another_tokenizer_without_messages_are_no_conversation() -> None:
    with pytest.raises(UnrenderableError, match="another tokenizer"):
        renderer().render(recorded([1000, 2, 3, 4], slice(-2, None)))
