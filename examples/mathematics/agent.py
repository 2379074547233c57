"""An AutoGen agent that solves word problems and leaves computing to a tool: `solver` reasons, `calculator` counts."""

from __future__ import annotations

import ast
import operator
import os
import re
from fractions import Fraction
from typing import Any

import lightning_autogen

lightning_autogen.attach()

from autogen_agentchat.agents import AssistantAgent  # noqa: E402
from autogen_core.models import ModelInfo  # noqa: E402
from autogen_core.tools import FunctionTool  # noqa: E402
from autogen_ext.models.openai import OpenAIChatCompletionClient  # noqa: E402

SOLVE = "Solve the problem step by step. Compute with the calculator. End with: Answer: NUMBER."
MOST_CALLS = 9
LONGEST = 120  # characters of an expression
INFO = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)
OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return compute(expression)


def compute(expression: str) -> str:
    """Evaluate numbers, + - * / and brackets, exactly.

    Raises:
        ValueError: it is none, is longer than `LONGEST`, or divides by zero.
    """
    if len(expression := expression.strip()) > LONGEST:
        raise ValueError(f"can't compute more than {LONGEST} characters")
    try:
        return format_value(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"can't compute {expression!r}") from error


def format_value(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.4f}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return Fraction(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("only numbers, + - * / and brackets")


TOOL = FunctionTool(calculator, description="Evaluate an arithmetic expression.")


def number_in(text: str) -> str | None:
    """Return the number or fraction after ``Answer:``; None where there is none."""
    found = re.findall(r"Answer:\s*((?:-?\$?|\$-)[\d,]*\.?\d+)(?:\s*/\s*(0*[1-9]\d*))?", text)
    if not found:
        return None
    above, below = found[-1]
    return format_value(Fraction(re.sub("[$,]", "", above)) / int(below or 1))


def right(task: dict[str, Any]) -> str:
    """Return a task's answer as `number_in` writes what is said: 1000 for 1,000 and for 1000.0.

    Raises:
        ValueError: it is not a number.
    """
    if (number := number_in(f"Answer: {task['answer']}")) is None:
        raise ValueError(f"the task's answer is not a number: {task['answer']!r}")
    return number


async def solve(problem: str) -> str:
    """Return what the agent says last."""
    client = OpenAIChatCompletionClient(
        model=os.environ.get("MATHEMATICS_MODEL", "policy"), model_info=INFO, max_tokens=100, max_retries=2
    )
    solver = AssistantAgent(
        "solver", client, tools=[TOOL], system_message=SOLVE, max_tool_iterations=MOST_CALLS, reflect_on_tool_use=False
    )
    try:
        result = await solver.run(task=problem)
    finally:
        await client.close()
    return str(result.messages[-1].to_text())


async def run(task: dict[str, Any]) -> float:
    """Run the program on a task: 1 where the number is right."""
    answer = right(task)
    return float(number_in(await solve(task["problem"])) == answer)
