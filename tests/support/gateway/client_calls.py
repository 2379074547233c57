"""What clients send and receive."""

from __future__ import annotations

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+7"}}\n</tool_call>'


def asked(model, messages, stream):
    """What a chat model of LangChain's answers, whole."""
    if not stream:
        return model.invoke(messages)
    whole = None
    for chunk in model.stream(messages):
        whole = chunk if whole is None else whole + chunk
    return whole
