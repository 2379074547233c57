"""A LangGraph program with two agents: `caller` calls a calculator, `answerer` words the answer from its result.

It runs anywhere an OpenAI-compatible model with tool calling runs. The one line that makes it trainable is `attach()`.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from typing import Any, TypedDict

import lightning_langchain

lightning_langchain.attach()

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import ToolException, tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from langgraph.graph import END, START, StateGraph  # noqa: E402

OPERATORS: dict[type[ast.operator], Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
EXAMPLES = [("12+7", "19"), ("9*6", "54")]


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError) as error:
        raise ToolException(f"bad expression {expression!r}") from error


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("only whole numbers and + - *")


class State(TypedDict, total=False):
    question: str
    result: str
    answer: str


def model(max_tokens: int) -> ChatOpenAI:
    """The same model for both agents; the address and key come from the environment, as in any OpenAI program."""
    return ChatOpenAI(model=os.environ.get("CALCULATOR_MODEL", "policy"), max_tokens=max_tokens, max_retries=2)


async def caller(state: State) -> State:
    """Ask the model for a tool call and run it. Without a good call there is no result."""
    messages: list[AnyMessage] = [SystemMessage("Call the calculator.")]
    for number, (expression, result) in enumerate(EXAMPLES):
        call = {"name": "calculator", "args": {"expression": expression}, "id": f"call_{number}"}
        messages += [HumanMessage(f"What is {expression}?"), AIMessage("", tool_calls=[call])]
        messages.append(ToolMessage(result, tool_call_id=f"call_{number}"))
    messages.append(HumanMessage(state["question"]))
    reply = await model(44).bind_tools([calculator]).ainvoke(messages)
    if not reply.tool_calls or reply.tool_calls[0]["name"] != "calculator":
        return {"result": ""}
    try:
        return {"result": (await calculator.ainvoke(reply.tool_calls[0])).content}
    except (ToolException, ValueError):
        return {"result": ""}


async def answerer(state: State) -> State:
    """Word the answer from the calculator's result."""
    messages: list[AnyMessage] = [SystemMessage("Reply in the form Answer: NUMBER.")]
    for expression, result in EXAMPLES[:1]:
        messages += [HumanMessage(f"What is {expression}?\n{result}"), AIMessage(f"Answer: {result}")]
    messages.append(HumanMessage(f"{state['question']}\n{state['result']}"))
    reply = await model(24).ainvoke(messages)
    return {"answer": str(reply.content)}


def build() -> Any:
    """caller, then answerer if there is a result."""
    graph = StateGraph(State)
    graph.add_node("caller", caller)
    graph.add_node("answerer", answerer)
    graph.add_edge(START, "caller")
    graph.add_conditional_edges("caller", lambda state: "answerer" if state["result"] else END)
    graph.add_edge("answerer", END)
    return graph.compile()


GRAPH = build()


async def run(task: dict[str, Any]) -> dict[str, float]:
    """Run the program on a task, as in production, and say how well each agent did.

    The caller earns 1 when its tool call gives the right number. The answerer earns 1 when the program's final answer
    is exactly `Answer: NUMBER` with the right number, which it can't without the caller.
    """
    state = await GRAPH.ainvoke({"question": task["question"]})
    right = str(task["answer"])
    found = re.fullmatch(r"Answer: (-?\d+)\.?", state.get("answer", "").strip())
    return {
        "caller": float(state["result"] == right),
        "answerer": float(found is not None and found[1] == right),
    }


async def outcome(task: dict[str, Any]) -> float:
    """Run the program on a task, and say only whether the final answer is right."""
    return (await run(task))["answerer"]
