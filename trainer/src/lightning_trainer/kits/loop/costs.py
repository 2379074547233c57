"""The cost of a round, estimated from the traces alone: nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_trainer.flags.common import reading
from lightning_trainer.kits.loop.config import LoopConfig
from lightning_trainer.kits.loop.loop import since
from lightning_trainer.kits.loop.record import rounds_in
from lightning_trainer.kits.loop.selection import cost_of_training, find_tasks, held_out_count


def forecast(config: LoopConfig, out: Path) -> dict[str, Any]:
    """Return the cost of each stage of the next round.

    Tokens are rollouts times the mean tokens of the new traces; None if these have no counted tokens.

    Raises:
        ConfigError: the method can't work with so many tasks.
    """
    rounds = [one for one in rounds_in(out) if one.end is not None] if out.is_dir() else []
    with reading(config.store, config.key_file) as store:
        found = find_tasks(config, store, since(rounds))
    count = max(found.count, config.select.least)  # the round waits until there are so many
    held_out = held_out_count(config, count)
    evaluated = {"rollouts": 2 * config.evaluate.samples * held_out}
    costs = {"train": cost_of_training(config, count - held_out), "evaluate": evaluated}
    stages = {stage: _with_tokens(cost, found.tokens) for stage, cost in costs.items()}
    return {
        "select": {
            "tasks": len(found.train),
            "held_out": len(found.held_out),
            "least": config.select.least,
            "left_out": dict(found.left_out),
        },
        "train": {"method": config.method, **stages["train"]},
        "evaluate": stages["evaluate"],
        "shadow": {"copies": config.shadow.copies, "share": config.shadow.share},
        "canary": {
            "share": config.canary.share,
            "conversations": config.canary.rules.bounds.needed(config.canary.share),
        },
        "approval": {"needed": config.approval},
    }


def cost_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield a forecast as one line for each stage."""
    picked, train, measured = found["select"], found["train"], found["evaluate"]
    few = picked["tasks"] + picked["held_out"] < picked["least"]
    waits = f"; it waits until there are {picked['least']}" if few else ""
    yield f"select    {picked['tasks']} new tasks to learn from, {picked['held_out']} held out{waits}"
    for reason, count in picked["left_out"].items():
        yield f"          {count} left out: {reason}"
    yield f"train     {train['method']}: {_amounts(train)}"
    yield f"evaluate  {_amounts(measured)}"
    shadow, canary = found["shadow"], found["canary"]
    yield f"shadow    {shadow['copies']} calls of the candidate, {100 * shadow['share']:g} % of the live conversations"
    yield (
        f"canary    about {canary['conversations']} conversations with an outcome, {100 * canary['share']:g} % of them"
        " answered by the candidate"
    )
    yield f"approval  {'a person approves' if found['approval']['needed'] else 'none: the gate alone decides'}"


def _with_tokens(cost: Mapping[str, int], tokens: float) -> dict[str, int | None]:
    """Add the tokens that a stage's rollouts take; None: unknown."""
    if "tokens" in cost:
        return dict(cost)
    return {**cost, "tokens": round(cost["rollouts"] * tokens) if tokens else None}


def _amounts(stage: Mapping[str, Any]) -> str:
    names = ("steps", "rollouts", "tokens")
    about = {"tokens": "about "} if "rollouts" in stage else {}
    return ", ".join(f"{about.get(name, '')}{stage[name]} {name}" for name in names if stage.get(name) is not None)
