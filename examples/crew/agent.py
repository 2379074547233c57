"""A crew of three that solves word problems: `Solver` writes an expression, `Checker` doubts it, `Reporter` words it.

A CrewAI program as one would write it. Train the Solver alone, by name: `--agents Solver`. The program computes what
the Solver wrote, so that no role has to.
"""

import ast
import operator
import os
import re
from fractions import Fraction
from typing import Any

import lightning_crewai

lightning_crewai.attach()

from crewai import LLM, Agent, BaseLLM, Crew, Task  # noqa: E402
from crewai.tasks.task_output import TaskOutput  # noqa: E402

LONGEST = 120  # characters of an expression
ROLES = {
    "Solver": ("write the arithmetic expression that solves a problem", "You write numbers, + - * / and brackets."),
    "Checker": ("say whether an expression fits its problem", "You say yes or no, and why in one sentence."),
    "Reporter": ("say the answer", "You end with: Answer: NUMBER."),
}
SOLVE = "Write one arithmetic expression that solves the problem.\n{problem}"
CHECK = "Does the expression fit the problem?\n{problem}"
REPORT = "Say the answer to the problem.\n{problem}"
OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


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


def add_value(output: TaskOutput) -> tuple[bool, Any]:  # CrewAI reads the type, so no postponed annotations here
    """Put the value beside what the Solver wrote: a guardrail that lets everything pass."""
    expression = output.raw.strip()
    try:
        return True, f"{expression} = {compute(expression)}"
    except ValueError:
        return True, f"{expression} can't be computed"


def make(problem: str, llm: BaseLLM | None = None) -> Crew:
    """Make the crew for a problem; each role asks the model of the environment unless another is given."""

    def agent(role: str) -> Agent:
        goal, backstory = ROLES[role]
        own = llm or LLM(model=os.environ.get("CREW_MODEL", "policy"), provider="openai", max_tokens=60)
        return Agent(role=role, goal=goal, backstory=backstory, llm=own, max_iter=1, max_retry_limit=0)

    solver, checker, reporter = (agent(role) for role in ROLES)
    solve = Task(
        description=SOLVE.format(problem=problem), expected_output="an expression", agent=solver, guardrail=add_value
    )
    check = Task(description=CHECK.format(problem=problem), expected_output="yes or no", agent=checker, context=[solve])
    report = Task(
        description=REPORT.format(problem=problem), expected_output="the answer", agent=reporter, context=[solve, check]
    )
    return Crew(agents=[solver, checker, reporter], tasks=[solve, check, report])


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


def value_of(solved: str) -> str | None:
    """Return the value that stands beside an expression; None where it could not be computed."""
    _, equals, value = solved.rpartition(" = ")
    return value if equals else None


def outcome(task: dict[str, Any]) -> dict[str, float]:
    answer = right(task)
    result = make(task["problem"]).kickoff()
    solved, _, _ = result.tasks_output
    return {"Solver": float(value_of(solved.raw) == answer), "Reporter": float(number_in(result.raw) == answer)}


def run(task: dict[str, Any]) -> float:
    """Run the crew on a task: 1 where what it reports is right."""
    return outcome(task)["Reporter"]


def run_solver(task: dict[str, Any]) -> dict[str, float]:
    """Run the crew on a task; the Solver earns 1 where its expression has the right value, whatever is reported."""
    return {"Solver": outcome(task)["Solver"]}
