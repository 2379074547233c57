"""Routes and client by which the trainer's process tells the run's server where the policy is, and calls its judge.

verl's trainer runs in a process that Ray starts somewhere; gateway, store and runner stay in the user's own process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.store import Store
from lightning_trainer.backends.verl.engine import VllmEngine
from lightning_trainer.choices import Timeouts
from lightning_trainer.gateway.http.guard import is_loopback
from lightning_trainer.judges import RolloutJudge
from lightning_trainer.report.metrics import Kind
from lightning_trainer.rl.rollouts import outcomes

_ANSWER_S = 60.0


class PolicyBody(BaseModel):
    """The state of the policy: its replicas and the version of their weights; without replicas, it is learning."""

    addresses: list[str] = []
    version: int = 0
    ended: bool = False


class StepBody(BaseModel):
    """The numbers of a step or of a validation, as verl logs them."""

    kind: Kind
    step: int
    values: dict[str, float]
    by_task: dict[str, dict[str, float]] | None = None


class JudgeBody(BaseModel):
    """The rollouts of a group that has ended."""

    rollout_ids: list[str]


class Verdict(BaseModel):
    """The reasons why rollouts were not judged, by rollout id. The rewards of the others are in the store."""

    unjudged: dict[str, str] = {}


def add_routes(
    app: Any,
    engine: VllmEngine,
    on_step: Callable[[Kind, int, Mapping[str, float], Mapping[str, Mapping[str, float]] | None], None],
    judging: Callable[[Sequence[str]], Mapping[str, str]],
) -> None:
    """Add the routes that the trainer's process calls to the app. Like all that name no key, they need an admin's."""

    async def policy(body: PolicyBody) -> dict[str, int]:
        if body.addresses:
            await engine.serve(body.addresses, body.version)
            return {"version": engine.version}
        cut = engine.pause()
        if body.ended:
            await engine.close()
        return {"cut": cut}

    async def step(body: StepBody) -> dict[str, int]:
        on_step(body.kind, body.step, body.values, body.by_task)
        return {"step": body.step}

    def judge(body: JudgeBody) -> Verdict:  # in a separate thread, so that the server continues meanwhile
        return Verdict(unjudged=dict(judging(body.rollout_ids)))

    # FastAPI reads the signatures. Under `from __future__ import annotations` it needs the types themselves.
    for endpoint, body, answer in (
        (policy, PolicyBody, dict[str, int]), (step, StepBody, dict[str, int]), (judge, JudgeBody, Verdict)
    ):  # fmt: skip
        endpoint.__annotations__ |= {"body": body, "return": answer}
        app.add_api_route(f"/api/verl/{endpoint.__name__}", endpoint, methods=["POST"], include_in_schema=False)


def judging_by(
    judge: RolloutJudge | None, store: Store, timeouts: Timeouts = "count"
) -> Callable[[Sequence[str]], Mapping[str, str]]:
    """Return a function that judges a group's rollouts, stores the rewards, and returns why some have none."""

    def judging(rollout_ids: Sequence[str]) -> Mapping[str, str]:
        if judge is None:
            raise ConfigError("this run has no judge.")
        judged = judge.verdicts(outcomes(store, store.rollouts(rollout_ids=rollout_ids), timeouts))
        return {each.rollout.rollout_id: each.unjudged for each in judged if each.unjudged is not None}

    return judging


@dataclass(frozen=True, slots=True)
class RunServerClient:
    """The trainer's side of the routes.

    Attributes:
        url: of the run's server.
        key: its admin key.
    """

    url: str
    key: str

    @classmethod
    def of(cls, lightning: Mapping[str, Any]) -> RunServerClient:
        """Read the section `lightning` of verl's configuration."""
        return cls(lightning["url"], Path(lightning["key_file"]).read_text(encoding="ascii").strip())

    def serve(self, addresses: Sequence[str], version: int) -> None:
        """Let calls go to these replicas, with weights of this version."""
        self._post("policy", {"addresses": list(addresses), "version": version})

    def pause(self) -> int:
        """Hold calls and cut those in progress; return how many were cut."""
        return int(self._post("policy", {}).get("cut", 0))

    def end(self) -> None:
        """Close the connections to the replicas, because the run is over."""
        self._post("policy", {"ended": True})

    def judge(self, rollout_ids: Sequence[str], limit_s: float) -> Mapping[str, str]:
        """Have a group's rollouts judged; return why some were not, by id. Rewards of the others are in the store.

        Args:
            rollout_ids: of rollouts that have ended.
            limit_s: longest time in seconds that the judge may take.
        """
        answer = self._post("judge", {"rollout_ids": list(rollout_ids)}, limit_s)
        return Verdict.model_validate(answer).unjudged

    def step(
        self, kind: Kind, step: int, values: Mapping[str, Any], by_task: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Report numbers, and for a validation the score by task. Values that are not finite numbers are left out."""
        numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
        self._post("step", {"kind": kind, "step": step, "values": numbers, "by_task": by_task})

    def _post(self, name: str, body: Mapping[str, Any], limit_s: float = _ANSWER_S) -> dict[str, Any]:
        headers, url = {"authorization": f"Bearer {self.key}"}, httpx.URL(f"{self.url}/api/verl/{name}")
        proxied = not is_loopback(url.host)  # a proxy for the internet does not reach our own machine
        try:
            response = httpx.post(url, json=body, headers=headers, timeout=limit_s, trust_env=proxied)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise LightningError(f"the run's server at {self.url} does not answer: {error}. Was it stopped?") from error
        answer: dict[str, Any] = response.json()
        return answer


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str) and math.isfinite(float(value))
