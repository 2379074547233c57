"""Output of `lightning-rl deploy`: a table of agents, a line for each finding, or JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from rich.markup import escape
from rich.table import Table

from lightning_spans.errors import ConfigError
from lightning_spans.schema.json import to_json
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_trainer.flags.common import screen
from lightning_trainer.kits.deploy.estimate.recorded import RecordedEstimate
from lightning_trainer.kits.deploy.outcomes import describe_gate, describe_guardrails
from lightning_trainer.kits.deploy.program_changes import describe_program
from lightning_trainer.kits.deploy.shadow.summary import describe_shadow

_SILENT: Final = 10  # expected outcomes; that a candidate that answers has none has a probability of e^-10

Histories: TypeAlias = Mapping[str, Sequence[Deployment]]  # by agent, oldest first
Findings: TypeAlias = Mapping[
    str, Any
]  # findings about an agent's candidate: `gate`, `guardrails`, `shadow`, `program`, and the `problem` of reading them


def read_findings(store: Store, histories: Histories) -> dict[str, Findings]:
    """Read the findings about the candidate of each agent; None for what is unknown, or cannot be read."""
    return {agent: _read_findings(store, history) for agent, history in histories.items()}


def _read_findings(store: Store, history: Sequence[Deployment]) -> Findings:
    try:
        return {
            "gate": describe_gate(store, history),
            "guardrails": describe_guardrails(store, history),
            "shadow": describe_shadow(store, history),
            "program": describe_program(store, history),
            "problem": None,
        }
    except ConfigError as error:  # such as a reward that is not between 0 and 1
        return {"gate": None, "guardrails": None, "shadow": None, "program": None, "problem": str(error)}


def status_json(
    histories: Histories, findings: Mapping[str, Findings], *, with_history: bool = False
) -> dict[str, Any]:
    """Return the state of agents as JSON."""
    agents = {}
    for agent, history in histories.items():
        newest = history[-1]
        agents[agent] = {name: getattr(newest, name) for name in ("stable", "candidate", "stage", "share", "previous")}
        agents[agent] |= findings[agent]
        if with_history:
            agents[agent]["history"] = [to_json(one) for one in history]
    return {"agents": agents}


def show(histories: Histories, findings: Mapping[str, Findings]) -> None:
    """Print the state of agents."""
    table = Table("agent", "stage", "stable", "candidate", "share", "outcomes", "difference", "gate")
    for agent, history in sorted(histories.items()):
        newest = history[-1]
        shared = newest.stage in ("shadow", "canary")
        share = f"{100 * newest.share:.3g} %" if shared else f"{newest.share:.3g}"
        names = (agent, newest.stage.replace("_", " "), newest.stable, newest.candidate or "", share)
        gate = ("", "", "unknown") if findings[agent]["problem"] else _gate_cells(findings[agent]["gate"])
        table.add_row(*(escape(cell) for cell in (*names, *gate)))
    screen().print(table)
    for agent in sorted(histories):
        if (problem := findings[agent]["problem"]) is not None:
            screen().print(escape(f"{agent}, candidate: {problem}"))
        for fact in _silence(histories[agent][-1], findings[agent]["gate"]):
            screen().print(escape(f"{agent}, candidate: {fact}"))
        for name, guard in (findings[agent]["guardrails"] or {}).items():
            screen().print(escape(f"{agent}, guardrail {name}: {_guard_fact(guard)}"))
        if (found := findings[agent]["shadow"]) is not None:
            screen().print(escape(f"{agent}, shadow: {'; '.join(_shadow_facts(found))}"))
        if (program := findings[agent]["program"]) is not None:
            screen().print(escape(f"{agent}, program: {_program_fact(program)}"))


def _gate_cells(gate: dict[str, Any] | None) -> tuple[str, str, str]:
    if gate is None:
        return "", "", ""
    found = "" if gate["difference"] is None else f"{gate['difference']:+.3f} [{gate['low']:+.3f}, {gate['high']:+.3f}]"
    of = "" if gate["needed"] is None else f" of about {gate['needed']}"
    return f"{gate['n']}{of}", found, gate["decision"]


def _silence(newest: Deployment, gate: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a line if the candidate has no outcome although some were expected, as if the server did not have it."""
    expected = 0 if gate is None or gate["candidate"] else round(newest.share * gate["n"])
    if expected >= _SILENT:
        yield (
            f"no outcome yet, although about {expected} were expected. If the server does not have"
            f" {newest.candidate}, its log says why"
        )


def _guard_fact(guard: Mapping[str, Any]) -> str:
    seen = f"{guard['candidate']} and {guard['stable']} conversations, at most {guard['bound']:+g} is allowed"
    if guard["difference"] is None:
        return f"{seen}; too few to judge"
    alarm = "; passed: roll it back" if guard["alarm"] else ""
    return f"{guard['difference']:+.3f} [{guard['low']:+.3f}, {guard['high']:+.3f}], {seen}{alarm}"


def _shadow_facts(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{found['copies']} copies of {found['conversations']} conversations, {found['failed']} failed,"
        f" {found['dropped']} dropped, {found['off_path']} not copied after other tool calls"
    )
    for kind, name in (("text", "the same text"), ("tool_call", "the same tool calls")):
        if (seen := found["agreement"][kind])["n"]:
            yield f"{name} {100 * seen['mean']:.1f} % [{100 * seen['low']:.1f}, {100 * seen['high']:.1f}]"
    if (judge := found["judge"]) is not None:
        yield _judge_fact(judge)
    for name, shares in found["rules"].items():
        yield f"{name} {100 * shares['candidate']:.1f} % (stable {100 * shares['stable']:.1f} %)"
    for name, unit in (("tokens", "tokens"), ("seconds", "s")):
        candidate, stable = (
            [_number(one) for one in found[name][policy].values()] for policy in ("candidate", "stable")
        )
        joined = " + ".join if name == "tokens" else ", p95 ".join
        yield f"{joined(candidate)} {unit} a call (stable {joined(stable)})"


def _judge_fact(judge: Mapping[str, Any]) -> str:
    failed = f", {judge['failed']} not judged: {judge['error']}" if judge["failed"] else ""
    if judge["difference"] is None:
        return f"judge: no verdict{failed}"
    return f"judge {judge['difference']:+.3f} [{judge['low']:+.3f}, {judge['high']:+.3f}]{failed}"


def _program_fact(program: Mapping[str, Any]) -> str:
    if program["changes"]:
        return f"CHANGED since the evaluation, so the gate is closed: {'; '.join(program['changes'])}"
    few = f"; it is compared after {program['needed']}" if program["conversations"] < program["needed"] else ""
    return f"unchanged since the evaluation, in {program['conversations']} conversations{few}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def show_estimate(current: Deployment, found: RecordedEstimate) -> None:
    """Print an off-policy estimate."""
    seen = found.estimate
    lines = [f"{seen.n} conversations, {found.calls} calls; effective sample size {seen.effective:.1f}"]
    if seen.refused is not None:
        lines.append(f"no estimate of {current.candidate}: {seen.refused}. Start a shadow or a small canary.")
    else:
        difference = f"{seen.difference:+.3f} [{seen.low:+.3f}, {seen.high:+.3f}]"
        lines.append(
            f"{current.candidate}: {seen.candidate:.3f}, {current.stable}: {seen.stable:.3f}, difference {difference};"
            f" {100 * seen.clipped:.1f} % of the weight was clipped"
        )
    lines += [f"  {count} calls left out: {why}" for why, count in found.left_out.items()]
    screen().print(escape("\n".join(lines)))


def show_history(history: Sequence[Deployment]) -> None:
    """Print the transitions of an agent."""
    table = Table("no.", "when", "stage", "stable", "candidate", "who", "why")
    for one in history:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at_ns / 1e9))
        cells = (str(one.number), when, one.stage, one.stable, one.candidate or "", one.actor, one.reason)
        table.add_row(*(escape(cell) for cell in cells))
    screen().print(table)
