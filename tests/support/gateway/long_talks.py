"""Texts that are hard to continue with the recorded tokens."""

from __future__ import annotations

import numpy as np

from lightning_spans.adapter.adapt import adapt
from lightning_spans.store.traces import traces_of
from lightning_trainer.rl.rows import make_rows
from support.fakes import ByteTokenizer

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
STRANGE = [*b'<tool_call>{"arguments":{"expression" : "', ByteTokenizer.merged, *b'"},"name":"calculator"}</tool_call>']
USER = {"role": "user", "content": "What is 12+7?"}


def rows_of(server, attempt):
    (trace,) = traces_of(server.store, attempt_ids=[attempt])
    transitions = adapt(trace)
    return make_rows(transitions, np.ones(len(transitions)), {f"rollout of {attempt}": "g"})
