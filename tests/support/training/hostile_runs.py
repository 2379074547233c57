"""The folder of a run in whose every field stands a script that says which field it came from, if it ever runs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning_spans.store import open_store
from support.deployments import canary_history
from support.training.example_runs import make_run
from support.view import Asked

FREE = {
    "spans": ("name", "agent", "status_message", "operation", "origin", "attributes"),
    "calls": ("agent", "policy", "response_id", "error", "request", "sampling"),
    "choices": ("finish_reason", "message"),
    "rewards": ("agent", "source"),
    "rollouts": ("task",),
    "attempts": ("worker", "error"),
    "deployments": ("agent", "stable", "candidate", "reason", "actor"),
    "viewer_marks": ("comment", "author", "span_id"),
}
"""Columns that anybody may write as they like; ids are in `_IDS`."""
_IDS = ("rollout_id", "group_id", "attempt_id", "call_id")
_KEPT = ("chat", "execute_tool", "invoke_agent")  # operations by which the viewer knows calls and tools


def script(field: str) -> str:
    """Return a text that calls `ran(field)` in each way in which a page may take text for markup or an address."""
    call = f"ran('{field}')"
    return f'"\'></span><script>{call}</script><img src=x onerror="{call}"><svg onload={call}>javascript:{call}'


def make_hostile_run(home: Path) -> Path:
    """Write the folder; its name is hostile, too."""
    run = make_run(home / "<img src=x onerror=ran('folder')>", steps=2, groups=2, size=3)
    store = open_store(str(run / "lightning.db"))
    rollout = store.rollouts()[-1].rollout_id
    store.add_deployments(canary_history("writer"))
    store.close()
    Asked(run).post("marks", rollout_id=rollout, comment="x", author="y")
    with closing(sqlite3.connect(run / "lightning.db")) as database, database:
        for table, columns in FREE.items():
            _rewrite(database, table, columns)
    _rewrite_log(run / "metrics.jsonl")
    options = json.loads((run / "config.json").read_text())
    told = {name: script(f"option {name}") for name in ("target", "algorithm", "backend", "credit", "model")}
    (run / "config.json").write_text(json.dumps({**options, **told, script("option"): "x", "agents": None}))
    return run


def _rewrite(database: sqlite3.Connection, table: str, columns: Iterable[str]) -> None:
    names = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    for name in (name for name in names if name in _IDS):
        database.execute(f"UPDATE {table} SET {name} = ? || {name} WHERE {name} IS NOT NULL", (script(name),))
    for column in columns:
        field = f"{table} {column}"
        for rowid, value in database.execute(f"SELECT rowid, {column} FROM {table}").fetchall():
            database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (_hostile(field, value), rowid))


def _hostile(field: str, value: Any) -> Any:
    if value in _KEPT:
        return value
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(_within(field, json.loads(value)))
    return script(field)


def _within(field: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _within(f"{field} {name}", inner) for name, inner in value.items()} | {script(field): "x"}
    if isinstance(value, list):
        return [_within(field, inner) for inner in value]
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(_within(field, json.loads(value)))
    return script(field) if isinstance(value, str) else value


def _rewrite_log(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for start in ("reward", "entropy", "response_tokens", "tool_error_rate", "reward_source"):
            line[f"{start}/{script(f'metric {start}')}"] = 0.5
        line["most_frequent"] = {script("frequent agent"): [script("frequent answer"), 0.9]}
    alarm = {"kind": "alarm", "step": 1, "time": 1.0, "steps_taken": 1}
    lines.append({**alarm, "name": script("alarm name"), "text": script("alarm text")})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
