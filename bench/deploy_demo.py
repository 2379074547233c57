"""Three candidates of one agent, brought to simulated users of a LangGraph service: a bad, a good, a flattering one.

Everything but the models and the users is real: the service is a LangGraph graph, its calls go through a server that
follows the table of deployments, users' feedback comes in by HTTP with an evaluator's key, and an operator does each
simulated minute what `lightning-rl deploy check` and `deploy promote` do. Time alone is simulated: a minute is a number
of conversations. Run it with ``nox -s deploy``; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import httpx
import tests_path  # noqa: F401 - for support
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.deploy.gate import Bounds
from lightning_trainer.kits.deploy.outcomes import GateRules, check_promotion, reject
from lightning_trainer.kits.deploy.routing import CONVERSATION_HEADER
from lightning_trainer.kits.deploy.serving import EVERY_S, deploying
from lightning_trainer.kits.deploy.table import keep, read_histories
from lightning_trainer.kits.deploy.transitions import Note, Policy, begin_canary, name_candidate, promote
from support.fakes import FakeEngine, Served, served

NOTE = Note("demonstration", "operator")
SHARE = 0.05
AT_ONCE = 8
AFTER = 3  # minutes that are watched after the end
SHOP, JUDGE = "evaluator:shop/outcome", "evaluator:judge/score"


@dataclass(frozen=True)
class Kind:
    """How often an answer of a policy helps the user, and pleases the judge."""

    helps: float
    pleases: float


STABLE = Kind(0.5, 0.5)
CANDIDATES = {"bad": Kind(0.2, 0.2), "good": Kind(0.8, 0.8), "flatterer": Kind(0.25, 0.9)}


@dataclass(frozen=True)
class Scenario:
    """A candidate, what decides at its gate, and where it must end."""

    name: str
    gate: str
    guardrails: dict[str, float]
    stage: str


SCENARIOS = (
    Scenario("bad", SHOP, {}, "rolled_back"),
    Scenario("good", SHOP, {}, "stable"),
    Scenario("flatterer", JUDGE, {f"outcome:{SHOP}": 0.03}, "rolled_back"),
)


class State(TypedDict):
    """What the graph passes on."""

    question: str
    conversation: str
    answer: str


def service(url: str, key: str) -> Any:
    """Return the service: one graph, whose writer calls its model as in production."""
    model = ChatOpenAI(model="stable", base_url=f"{url}/v1", api_key=key, max_retries=0)  # type: ignore[arg-type]

    def write(state: State) -> dict[str, str]:
        headers = {CONVERSATION_HEADER.decode(): state["conversation"], "x-lightning-agent": "writer"}
        reply = model.invoke(state["question"], extra_headers=headers)
        return {"answer": str(reply.content)}

    graph = StateGraph(State)
    graph.add_node("writer", write)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", END)
    return graph.compile()


class Users:
    """Hold conversations, a number of them each simulated minute, and say what they came to.

    Args:
        server: that the service calls.
        scenario: whose candidate answers a share of them.
    """

    def __init__(self, server: Served, scenario: Scenario) -> None:
        self._graph = service(server.url, server.keys.issue("caller", holder="shop"))
        self._kinds = {"stable": STABLE, scenario.name: CANDIDATES[scenario.name]}
        self._random = random.Random(scenario.name)
        keys = {name: server.keys.issue("evaluator", holder=name) for name in ("shop", "judge")}
        self._clients = {
            name: httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60.0)
            for name, key in keys.items()
        }

    def talk(self, pool: ThreadPoolExecutor, minute: int, number: int) -> list[str]:
        """Hold a minute's conversations; return which policy answered each."""
        names = [f"{minute}-{place}" for place in range(number)]
        states = [State(question="Where is my parcel?", conversation=name, answer="") for name in names]
        answers = [found["answer"] for found in pool.map(self._graph.invoke, states)]
        kinds = [self._kinds[answer] for answer in answers]
        self._reward("shop", "outcome", names, [float(self._random.random() < kind.helps) for kind in kinds])
        self._reward("judge", "score", names, [float(self._random.random() < kind.pleases) for kind in kinds])
        return answers

    def _reward(self, who: str, what: str, names: list[str], values: list[float]) -> None:
        rewards = [
            {
                "rollout_id": f"conversation:{name}",
                "attempt_id": f"conversation:{name}",
                "value": value,
                "source": what,
                "reward_id": f"{what} {name}",
            }
            for name, value in zip(names, values, strict=True)
        ]
        self._clients[who].post("/api/rewards", json={"rewards": rewards}).raise_for_status()


@contextmanager
def site(scenario: Scenario) -> Iterator[Served]:
    """Serve the stable policy and a candidate, whose canary begins, and follow the table of deployments."""
    engines: Any = [FakeEngine(lambda _, said=said: said, model=said, piece=64) for said in ("stable", scenario.name)]
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), engine=engines) as server:
        begin(server, scenario)
        with deploying(server.app):
            yield server


def begin(server: Served, scenario: Scenario) -> None:
    """Name the candidate, and begin its canary."""
    rules = GateRules(bounds=Bounds(), sources=(scenario.gate,), guardrails=scenario.guardrails)
    named = name_candidate(None, "writer", Policy(scenario.name), NOTE, stable="stable")
    keep(server.store, named)
    keep(server.store, replace(begin_canary(named, "writer", SHARE, NOTE), details=rules.to_details()))


def look(server: Served) -> str:
    """Do what an operator's cron job does: check, and promote if the gate allows it. Returns the stage."""
    history = read_histories(server.store)["writer"]
    if history[-1].stage != "canary":
        return history[-1].stage
    if (rejected := reject(server.store, history)) is not None:
        keep(server.store, rejected)
        return rejected.stage
    try:
        details = check_promotion(server.store, history, override=False)
    except ConfigError:
        return history[-1].stage
    keep(server.store, replace(promote(history[-1], "writer", NOTE), details=details))
    return "stable"


def play(scenario: Scenario, minutes: int, number: int) -> dict[str, Any]:
    """Let a candidate run; return its share of the conversations by minute, and where it ended."""
    shares: list[float] = []
    canary_shares: list[float] = []
    ended: int | None = None
    with site(scenario) as server, ThreadPoolExecutor(AT_ONCE) as pool:
        users = Users(server, scenario)
        for minute in range(minutes):
            answers = users.talk(pool, minute, number)
            shares.append(answers.count(scenario.name) / number)
            if ended is None:
                canary_shares.append(shares[-1])
                if look(server) != "canary":
                    ended = minute + 1
                    time.sleep(4 * EVERY_S)  # a server reads the table every EVERY_S
            elif minute >= ended + AFTER:
                break
        newest = read_histories(server.store)["writer"][-1]
    facts = {"stage": newest.stage, "actor": newest.actor, "reason": newest.reason, "minutes": ended}
    share = sum(canary_shares) / len(canary_shares)
    return {**facts, "share_in_canary": share, "after": shares[ended:] if ended else [], "shares": shares}


def problem(scenario: Scenario, found: dict[str, Any]) -> str | None:
    """Return how a candidate ended otherwise than promised; None if it did not."""
    if found["stage"] != scenario.stage:
        return f"{scenario.name} ended as {found['stage']}, not as {scenario.stage}"
    wrong = 0.0 if scenario.stage == "rolled_back" else 1.0
    # New conversations go to the stable policy at once; those of this simulation last one call.
    if any(share != wrong for share in found["after"]):
        return f"after its end, {scenario.name} answered {found['after']} of the conversations"
    if found["share_in_canary"] > 1.5 * SHARE:  # of the conversations that came, as their hashes fell
        return f"{scenario.name} answered {100 * found['share_in_canary']:.1f} % in its canary"
    return None


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the share of the conversations that each candidate answered, by simulated minute."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for name, found in results.items():
        shares = [100 * share for share in found["shares"]]
        axes.plot(range(1, len(shares) + 1), shares, label=f"{name}: {found['stage'].replace('_', ' ')}")
    axes.set(xlabel="simulated minutes since the canary began", ylabel="% of conversations answered", ylim=(0, 102))
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Play all scenarios; return 1 if one ended otherwise than promised."""
    options = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    options.add_argument("--minutes", type=int, default=60, help="simulated minutes at most")
    options.add_argument("--conversations", type=int, default=200, help="of a simulated minute")
    options.add_argument("--curve", type=Path, help="file of the curve (PNG)")
    given = options.parse_args()
    results, problems = {}, []
    for scenario in SCENARIOS:
        found = results[scenario.name] = play(scenario, given.minutes, given.conversations)
        problems += [one for one in [problem(scenario, found)] if one is not None]
        print(
            f"{scenario.name}: {found['stage']} after {found['minutes']} simulated minutes by {found['actor']},"
            f" {100 * found['share_in_canary']:.1f} % of the conversations in its canary; {found['reason']}",
            flush=True,
        )
    if given.curve is not None:
        draw(results, given.curve)
    kept = ("stage", "minutes", "share_in_canary", "reason")
    print(json.dumps({"problems": problems, **{n: {k: f[k] for k in kept} for n, f in results.items()}}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
