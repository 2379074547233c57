"""`lightning-rl deploy`."""

from __future__ import annotations

import getpass
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lightning_trainer.flags.answers import model_flag
from lightning_trainer.flags.common import allow_blocked_option, given_flags, print_json, reading
from lightning_trainer.flags.files import agent_flag, json_option, key_file_option, server_flag, store_option
from lightning_trainer.flags.group import group_options
from lightning_trainer.kits.deploy.flags import GATE_OPTIONS, gate_options, outcomes_option, parse_bounds, share_option
from lightning_trainer.report.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning_spans.store import Store
    from lightning_spans.store.deployments import Deployment
    from lightning_trainer.kits.deploy.transitions import Note

_reason_option = click.option("--reason", default="", metavar="TEXT", help="Why, for the history.")


@click.group(name="deploy")
def command() -> None:
    """Bring a candidate policy to users, agent by agent.

    A candidate first answers nobody, then copies of live calls (shadow), then a share of the conversations (canary),
    then all (promote). At each step, rollback returns to the policy before. The table of deployments is in the store of
    `lightning-rl server`, which follows it. See docs/how-to/deploy.md.
    """


_transition_options = group_options(
    agent_flag("Agent whose policy changes.", required=True),
    _reason_option,
    click.option("--by", "actor", metavar="NAME", help="Who, for the history. Default: your login name."),
    store_option,
    key_file_option,
    json_option,
)
"""The options that every transition has."""


@command.command(name="status")
@agent_flag("Only this agent, with its history.")
@store_option
@key_file_option
@json_option
def status(*, agent: str | None, store: str, key_file: Path | None, as_json: bool) -> None:
    """Show which policies answer each agent."""
    from lightning_spans.errors import ConfigError
    from lightning_spans.store.urls import without_secrets
    from lightning_trainer.kits.deploy.display import read_findings, show, show_history, status_json
    from lightning_trainer.kits.deploy.table import read_histories

    with reading(store, key_file) as opened:
        histories = read_histories(opened)
        if agent is not None and agent not in histories:
            known = ", ".join(histories) or "none"
            raise ConfigError(f"{agent} has no deployment. Agents that have one: {known}.")
        chosen = {agent: histories[agent]} if agent is not None else histories
        findings = read_findings(opened, chosen)
    if as_json:
        print_json(status_json(chosen, findings, with_history=agent is not None))
        return
    if not chosen:
        click.echo(
            f"No agent has a deployment in {without_secrets(store)}. Start: lightning-rl deploy candidate --help"
        )
        return
    show(chosen, findings)
    if agent is not None:
        show_history(histories[agent])


@command.command(name="candidate")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Run with the adapter, or file of `prompts`.")
@click.option("--policy", metavar="NAME", help="Adapter in the checkpoint. Default: the agent's own, or the only one.")
@click.option("--base", metavar="MODEL", help="Model of the server that loads the adapter, or gets the prompt.")
@allow_blocked_option
@model_flag("Model that the server already has, instead of --checkpoint.", metavar="MODEL")
@click.option("--stable", metavar="MODEL", help="Model that answers the agent today. Needed the first time.")
@click.option(
    "--needs-approval/--no-approval",
    default=None,
    help="Whether a person must approve its promotion. Default: as for the agent's last candidate, at first no.",
)
@click.option(
    "--evaluation",
    type=click.Path(path_type=Path),
    help="Folder of the candidate's evaluation (`eval`). Promotion is refused if the program has changed since then.",
)
@_transition_options
def candidate(
    *,
    checkpoint: Path | None,
    policy: str | None,
    base: str | None,
    allow_blocked: bool,
    model: str | None,
    stable: str | None,
    needs_approval: bool | None,
    evaluation: Path | None,
    agent: str,
    **options: Any,
) -> None:
    """Name a candidate. Servers load it, and it answers nobody yet."""
    from lightning_trainer.kits.deploy import approvals
    from lightning_trainer.kits.deploy.approvals import is_url
    from lightning_trainer.kits.deploy.policies.candidates import read_policy
    from lightning_trainer.kits.deploy.policies.served import note_on_unseen_agent, refuse_unserved_models
    from lightning_trainer.kits.deploy.program_watch import PROGRAM
    from lightning_trainer.kits.deploy.transitions import name_candidate
    from lightning_trainer.kits.evaluation.folder import read_program

    chosen = read_policy(agent, checkpoint, policy, base, model)
    _refuse_blocked(chosen.checkpoint, allowed=allow_blocked)
    evaluated = {} if evaluation is None else {PROGRAM: read_program(evaluation)}
    if is_url(options["store"]):
        models = {"--model": model, "--base": base, "--stable": stable}
        refuse_unserved_models(options["store"], options["key_file"], models)

    def name(history: Sequence[Deployment], note: Note, opened: Store) -> Deployment:
        if not history and (unseen := note_on_unseen_agent(opened, agent)) is not None:
            click.echo(printable(unseen), err=True)
        named = name_candidate(_last(history), agent, chosen, note, stable=stable)
        needed = approvals.needs_approval(history) if needs_approval is None else needs_approval
        return replace(named, details={**evaluated, **({approvals.NEEDS_APPROVAL: True} if needed else {})})

    _change(agent, options, name)


@command.command(name="shadow")
@share_option(None, "Share of the conversations. Default: 100%, or as before if the shadow has begun.")
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="NAME",
    help="Guardrail whose share of bad answers is compared, such as slower-than-10. Default: refused and cut. May be"
    " repeated.",
)
@click.option(
    "--judge",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of a judge of answers that differ: endpoint, model, ... May be repeated. none: no judge, as at first.",
)
@_transition_options
def shadow(*, share: float | None, rules: tuple[str, ...], judge: tuple[str, ...], agent: str, **options: Any) -> None:
    """Let the candidate answer copies of the agent's live calls. Users get and wait for the stable policy's answers.

    Tools are not executed. `deploy status` compares the answers. The judge is called by the server. A shadow that has
    begun keeps the share, the rules and the judge that are not given again.
    """
    from lightning_trainer.kits.deploy.acting.comparisons import compare_in_shadow

    judged = {"judge": None} if judge == ("none",) else given_flags({"judge": judge})
    given = {**({"rules": rules} if rules else {}), **judged}
    _change(agent, options, lambda history, note, _: compare_in_shadow(_last(history), agent, share, note, given))


@command.command(name="estimate")
@agent_flag("Agent whose candidate is estimated.", required=True)
@server_flag("vLLM that has the candidate; its key: $LIGHTNING_UPSTREAM_KEY.", required=True)
@outcomes_option
@click.option("--calls", default=2000, show_default=True, help="Newest calls of the stable policy to use.")
@store_option
@key_file_option
@json_option
def estimate(
    *, agent: str, server: str, sources: tuple[str, ...], calls: int, store: str, key_file: Path | None, as_json: bool
) -> None:
    """Estimate a candidate's mean outcome from recorded calls of the stable policy, before any canary.

    The candidate's server scores the recorded tokens (importance sampling); it answers nobody. The estimate is refused
    if the two policies differ too much for it.
    """
    from contextlib import closing

    from lightning_trainer.kits.deploy.display import show_estimate
    from lightning_trainer.kits.deploy.estimate.recorded import check_candidate, estimate_from_records
    from lightning_trainer.kits.deploy.table import read_histories
    from lightning_trainer.kits.teaching.endpoint import EndpointTeacher

    with reading(store, key_file) as opened:
        current = check_candidate(read_histories(opened).get(agent, []), agent)
        text = f"{current.candidate}={server}"
        with closing(EndpointTeacher(text, role="candidate", key_name="LIGHTNING_UPSTREAM_KEY")) as scorer:
            found = estimate_from_records(opened, current, scorer.logprobs, sources=sources, most=calls)
    if as_json:
        print_json({"agent": agent, "policy": current.candidate, **found.to_json()})
    else:
        show_estimate(current, found)


@command.command(name="canary")
@share_option("5%", "Share of the conversations. [default: 5%]")
@outcomes_option
@gate_options
@click.option(
    "--guard",
    "guards",
    multiple=True,
    callback=parse_bounds,
    metavar="NAME=SHARE",
    help="Guardrail: how much larger the candidate's share of such calls may be. NAME is failed, refused, cut,"
    " slower-than-SECONDS, longer-than-CHARACTERS or tool-failed; or outcome:SOURCE, by how much less reward the source"
    " may give. May be repeated.",
)
@_transition_options
def canary(
    *,
    share: float,
    sources: tuple[str, ...],
    agent: str,
    guards: dict[str, float],
    **options: Any,
) -> None:
    """Let the candidate answer a share of the agent's conversations.

    A conversation stays with the policy that answered its first call. Outcomes, guardrails and the bounds of the gate
    are fixed when the candidate's first canary begins: after that, only the share can change.
    """
    from lightning_trainer.kits.deploy.acting.comparisons import compare_in_canary

    source_of = click.get_current_context().get_parameter_source
    gate: dict[str, Any] = {name: options.pop(name) for name in GATE_OPTIONS}
    given = {name: value for name, value in gate.items() if source_of(name) is not ParameterSource.DEFAULT}
    given |= {name: value for name, value in (("outcomes", sources), ("guards", guards)) if value}
    _change(agent, options, lambda history, note, _: compare_in_canary(_last(history), agent, share, note, given))


@command.command(name="approve")
@click.argument("agent")
@click.option("--candidate", metavar="NAME", help="Approve only this candidate. Default: approve any.")
@_reason_option
@store_option
@key_file_option
@json_option
def approve(
    *, agent: str, candidate: str | None, reason: str, store: str, key_file: Path | None, as_json: bool
) -> None:
    """Approve the candidate of AGENT, with the key of an approver (`lightning-rl key approver`).

    A candidate that was named with --needs-approval is promoted only after that. No other key can approve. --store must
    be the URL of the server, which signs the approval.
    """
    from lightning_trainer.flags.common import read_key
    from lightning_trainer.kits.deploy.approvals import request_approval

    approved = request_approval(store, read_key(key_file), agent, candidate, reason)
    if as_json:
        print_json(approved)
    else:
        click.echo(f"{approved['actor']} approved {approved['candidate']} as the policy of {agent}")


@command.command(name="promote")
@click.option("--override", is_flag=True, help="Promote without the gate; needs --reason.")
@allow_blocked_option
@_transition_options
def promote(*, override: bool, allow_blocked: bool, agent: str, **options: Any) -> None:
    """Make the candidate the stable policy, if the gate has decided so and a needed approval has been given."""
    from lightning_spans.errors import ConfigError
    from lightning_trainer.kits.deploy.promotion import make_promotion
    from lightning_trainer.kits.deploy.transitions import promote

    if override and not options["reason"]:
        raise ConfigError("deploy promote: --override needs --reason, for the history.")

    def make(history: Sequence[Deployment], note: Note, store: Store) -> Deployment:
        if not history:
            return promote(None, agent, note)  # raises an error that says what to do
        where = {"url": options["store"], "key_file": options["key_file"]}
        return make_promotion(store, history, note, **where, override=override, allow_blocked=allow_blocked)

    _change(agent, options, make)


@command.command(
    name="check", epilog="From cron, every minute: lightning-rl deploy check --store http://server:8000 ..."
)
@store_option
@key_file_option
@json_option
def check(*, store: str, key_file: Path | None, as_json: bool) -> None:
    """Roll back what its gate or a guardrail rejects, with the reason, and show the status of all agents."""
    from lightning_spans.errors import ConfigError
    from lightning_trainer.kits.deploy.display import read_findings, show, status_json
    from lightning_trainer.kits.deploy.outcomes import reject
    from lightning_trainer.kits.deploy.table import keep, read_histories

    with reading(store, key_file) as opened:
        problems = []
        for history in read_histories(opened).values():
            try:
                if (rejected := reject(opened, history)) is not None:
                    keep(opened, rejected)
            except ConfigError as problem:  # one agent's outcomes must not block the other agents
                problems.append(problem)
        if problems:
            raise problems[0]
        histories = read_histories(opened)
        findings = read_findings(opened, histories)
    if as_json:
        print_json(status_json(histories, findings))
    else:
        show(histories, findings)


@command.command(name="rollback")
@click.option(
    "--last-promotion",
    is_flag=True,
    help="Return to the policy before the last promotion, although a candidate was rolled back after it.",
)
@_transition_options
def rollback(*, last_promotion: bool, agent: str, **options: Any) -> None:
    """Drop the candidate, or return to the policy before the last promotion.

    A second rollback after one that dropped a candidate, such as that of `deploy check`, is refused. Servers follow
    within a second. The next call of every conversation goes to the stable policy.
    """
    from lightning_trainer.kits.deploy.transitions import roll_back

    _change(agent, options, lambda history, note, _: roll_back(history, agent, note, last_promotion=last_promotion))


def _change(
    agent: str, options: Mapping[str, Any], transition: Callable[[Sequence[Deployment], Note, Store], Deployment]
) -> None:
    """Read an agent's history, write the next transition, and show it."""
    from lightning_trainer.kits.deploy.display import read_findings, show, status_json
    from lightning_trainer.kits.deploy.table import keep, read_histories
    from lightning_trainer.kits.deploy.transitions import Note

    with reading(options["store"], options["key_file"]) as opened:
        history = read_histories(opened).get(agent, [])
        made = transition(history, Note(options["reason"], options["actor"] or getpass.getuser()), opened)
        keep(opened, made)
        after = {agent: [*history, made]}
        findings = read_findings(opened, after)
    if options["as_json"]:
        print_json(status_json(after, findings))
    else:
        show(after, findings)


def _refuse_blocked(checkpoint: str | None, *, allowed: bool) -> None:
    from lightning_trainer.lineage.blocks import refuse_blocked

    if checkpoint is not None:
        refuse_blocked(Path(checkpoint), allowed=allowed)


def _last(history: Sequence[Deployment]) -> Deployment | None:
    return history[-1] if history else None
