"""tau2's domains as a program: an agent serves a customer with a domain's tools and policy, and earns tau2's reward.

Tasks, tools, policies, the orchestrator and the evaluator are tau2's own. `mock` and `telecom` have
tasks with a ticket, which need no user; `airline` and `retail` have a user whom a model plays (`--user-llm`), at an
endpoint of its own: only the calls of `agent` are trained. `python agent.py` writes `train.jsonl` and `val.jsonl`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path
from typing import Any

import lightning_openai

lightning_openai.attach()

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM asks the network for prices

from loguru import logger  # noqa: E402
from tau2.agent.llm_agent import LLMAgent, LLMSoloAgent  # noqa: E402
from tau2.evaluator.evaluator import EvaluationType  # noqa: E402
from tau2.registry import registry  # noqa: E402
from tau2.run import run_task  # noqa: E402

from lightning_spans import agent as at_work  # noqa: E402

logger.remove()  # tau2 tells every message
MAX_STEPS = 60


class NamedAgent(LLMAgent):  # type: ignore[misc]
    """tau2's agent, whose model calls carry the name `agent`."""

    def generate_next_message(self, *args: Any, **named: Any) -> Any:
        with at_work("agent"):
            return super().generate_next_message(*args, **named)


class Solo(LLMSoloAgent):  # type: ignore[misc]
    """The same for tasks with a ticket and no user."""

    def generate_next_message(self, *args: Any, **named: Any) -> Any:
        with at_work("agent"):
            return super().generate_next_message(*args, **named)


registry.register_agent(NamedAgent, "lightning")
registry.register_agent(Solo, "lightning_solo")


def run(task: dict[str, Any]) -> float:
    """Simulate one task, and return tau2's reward."""
    user = task.get("user_llm")
    try:
        simulation = run_task(
            domain=task["domain"],
            task=tasks(task["domain"])[task["id"]],
            agent="lightning" if user else "lightning_solo",
            user="user_simulator" if user else "dummy_user",
            llm_agent=f"openai/{os.environ.get('MODEL', 'policy')}",
            llm_args_agent={"api_key": os.environ.get("OPENAI_API_KEY") or "none"},
            llm_user=user,
            llm_args_user={"temperature": 0.0} if user else None,
            max_steps=MAX_STEPS,
            evaluation_type=EvaluationType.ALL,
        )
    except ValueError as error:
        if "not found" not in str(error):
            raise
        return 0.0  # tau2 asks about something that the agent should have made and did not
    return float(simulation.reward_info.reward)


def alone(task: Any) -> bool:
    """Whether a task can be done without a user: it has a ticket, and nothing that a user must hear."""
    wanted = task.evaluation_criteria
    return bool(task.ticket and wanted and not wanted.communicate_info and LLMSoloAgent.check_valid_task(task))


@functools.cache
def tasks(domain: str) -> dict[str, Any]:
    """Return a domain's tasks by id."""
    return {str(task.id): task for task in registry.get_tasks_loader(domain)()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--domain", default="mock", help="mock, telecom, airline or retail")
    parser.add_argument("--user-llm", help="the model that plays the user, as LiteLLM names it; without it, no user")
    chosen = parser.parse_args()
    found = tasks(chosen.domain)
    kept = [key for key, task in found.items() if chosen.user_llm or alone(task)]
    if not kept:
        raise SystemExit(f"{chosen.domain} has no task with a ticket: name who plays the user with --user-llm.")
    for part, keys in (("train", [k for n, k in enumerate(kept) if n % 3]), ("val", kept[::3])):
        rows = [{"domain": chosen.domain, "id": key, "user_llm": chosen.user_llm} for key in keys]
        Path(f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{part}.jsonl: {len(rows)} tasks")
