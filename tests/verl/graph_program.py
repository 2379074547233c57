"""A LangGraph program with two agents, as a user has it."""

from __future__ import annotations

from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

import lightning_langchain

lightning_langchain.attach()


class State(TypedDict):
    question: str
    draft: str
    answer: str


def _model() -> ChatOpenAI:
    return ChatOpenAI(model="any", base_url="http://127.0.0.1:9/v1", api_key="the user's own", max_retries=0)


async def writer(state: State) -> dict[str, str]:
    reply = await _model().ainvoke(state["question"], max_tokens=6)
    return {"draft": str(reply.content)}


async def editor(state: State) -> dict[str, str]:
    reply = await _model().ainvoke(f"Make it better: {state['draft']}", max_tokens=6)
    return {"answer": str(reply.content)}


def _graph():
    graph = StateGraph(State)
    graph.add_node("writer", writer)
    graph.add_node("editor", editor)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "editor")
    graph.add_edge("editor", END)
    return graph.compile()


GRAPH = _graph()


async def run(task: dict) -> float:
    """Write and edit, and be paid for the share of vowels."""
    state = await GRAPH.ainvoke({"question": task["question"]})
    text = state["draft"] + state["answer"]
    return sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))
