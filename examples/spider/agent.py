"""Three agents that answer questions about a database nobody has seen: `writer`, `checker` and `rewriter`.

A LangGraph program as one would write it. The writer writes a query; where SQLite runs it, the checker says whether its
rows answer the question; where SQLite refuses it or the checker says no, the rewriter writes another.
"""

from __future__ import annotations

import os
from typing import TypedDict

import lightning_langchain
import lightning_spans

lightning_langchain.attach()

from database import QueryError, execute, matches, schema  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from langgraph.graph import END, START, StateGraph  # noqa: E402

WRITE = "Write one SQLite query that answers the question."
CHECK = "Do the rows answer the question? Say yes or no."


class State(TypedDict, total=False):
    database: str
    question: str
    first: str
    query: str
    said: str  # what SQLite said: its error, or the first rows
    failed: bool


def format_question(database: str, question: str) -> str:
    return f"{schema(database)}\n\n{question}"


def doubt(query: str, said: str) -> str:
    return f"{query}\nSQLite says: {said}"


def ask(*messages: tuple[str, str], max_tokens: int) -> str:
    model = ChatOpenAI(model=os.environ.get("SQL_MODEL", "policy"), max_tokens=max_tokens, max_retries=2)
    return str(model.invoke(list(messages)).content)


def only_query(text: str) -> str:
    return text.strip().split("\n\n")[0].strip().rstrip(";")


@lightning_spans.tool
def sqlite(database: str, query: str) -> str:
    """Return how many rows a query finds, and the first.

    Raises:
        QueryError: SQLite refused it.
    """
    rows = execute(database, query)
    return f"{len(rows)} rows, first {rows[0]!r}"[:120] if rows else "no rows"


def look(database: str, query: str) -> tuple[str, bool]:
    """Run a query; what SQLite said of it, and whether it failed."""
    try:
        return sqlite(database, query), False
    except QueryError as error:
        return f"error: {error}"[:120], True


def writer(state: State) -> State:
    database, question = state["database"], state["question"]
    query = only_query(ask(("system", WRITE), ("user", format_question(database, question)), max_tokens=80))
    said, failed = look(database, query)
    return {"first": query, "query": query, "said": said, "failed": failed}


def checker(state: State) -> State:
    text = f"{format_question(state['database'], state['question'])}\n\n{doubt(state['query'], state['said'])}"
    verdict = ask(("system", CHECK), ("user", text), max_tokens=3)
    return {"failed": verdict.strip().lower().startswith("no")}


def rewriter(state: State) -> State:
    database, question = state["database"], state["question"]
    turns = (
        ("system", WRITE),
        ("user", format_question(database, question)),
        ("assistant", state["query"]),
        ("user", f"SQLite says: {state['said']}. Write another query."),
    )
    return {"query": only_query(ask(*turns, max_tokens=80))}


def after_writer(state: State) -> str:
    return "rewriter" if state["failed"] else "checker"


def after_checker(state: State) -> str:
    return "rewriter" if state["failed"] else END


builder = StateGraph(State)
for node in (writer, checker, rewriter):
    builder.add_node(node.__name__, node)
builder.add_edge(START, "writer")
builder.add_conditional_edges("writer", after_writer, ["rewriter", "checker"])
builder.add_conditional_edges("checker", after_checker, ["rewriter", END])
builder.add_edge("rewriter", END)
graph = builder.compile()


def run(task: dict[str, str]) -> float:
    """Run the program on a task: 1 where its last query is right, by execution accuracy."""
    out = graph.invoke({"database": task["database"], "question": task["question"]})
    return float(matches(task["database"], out["query"], task["query"]))


def run_by_agent(task: dict[str, str]) -> dict[str, float]:
    """Run the program on a task; each of the two agents earns 1 where the query that it wrote is right."""
    out = graph.invoke({"database": task["database"], "question": task["question"]})
    earned = {"writer": float(matches(task["database"], out["first"], task["query"]))}
    if out["failed"]:
        earned["rewriter"] = float(matches(task["database"], out["query"], task["query"]))
    return earned
