"""What the viewer's interface answers with. FastAPI describes these records, and the pages' types are made of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run in the list of runs. Rewards are means over rollouts; None where there is none."""

    name: str
    model: str | None
    agents: list[str] | None
    steps: int
    started_s: float | None
    updated_s: float | None
    reward_first: float | None
    reward_last: float | None
    val_first: float | None
    val_last: float | None
    alarms: int
    curve: list[float]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The rollouts of a step, or of the validation before it, as the store has them.

    Attributes:
        mode: ``train``, ``val``, or ``other`` for rollouts that no run of ours named.
        step: steps taken before; of ``other`` 0.
        groups: how many.
        rollouts: how many.
        status: number of rollouts that stand so, by status.
        reward: mean over the rollouts that succeeded and were rewarded; None without one.
        interval: half the width of its 95 % interval, from the spread of the groups' means; None below two groups.
        low: the lowest.
        high: the highest.
        flat: groups in which all rewards are equal.
    """

    mode: str
    step: int
    groups: int
    rollouts: int
    status: dict[str, int]
    reward: float | None
    interval: float | None
    low: float | None
    high: float | None
    flat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """A run: its options, the numbers of its steps, its alarms, and what its store holds."""

    name: str
    options: dict[str, Any]
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    steps: list[StepRow]
    loose: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A rollout in its group.

    Attributes:
        rollout_id: its id.
        attempt_id: the attempt that counts, else its last; None before one began.
        status: ``succeeded``, ``crashed`` (by the policy's doing), ``failed``, ``running``, ``queued``, ``cancelled``.
        attempts: how many there were.
        reward: what it counts as; None where it does not count.
        by_agent: rewards of agents, where given by agent.
        error: the end of the error, where there was one.
        kind: the error's type in a word.
        seconds: that its attempt took; None while it runs.
    """

    rollout_id: str
    attempt_id: str | None
    status: str
    attempts: int
    reward: float | None
    by_agent: dict[str, float]
    error: str | None
    kind: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A group: rollouts of one task, whose rewards are compared."""

    group_id: str
    task: str
    mean: float | None
    deviation: float | None
    signal: bool
    rollouts: list[RolloutRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPage:
    """Some groups of a step; `next` is where to go on, None at the end."""

    mode: str
    step: int
    groups: list[GroupRow]
    total: int
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What happened in a rollout, counted in its trace: the same numbers as `lightning-rl traces --json` has lines."""

    rollout_id: str
    attempt_id: str
    spans: int
    calls: int
    tools: dict[str, int]
    tool_errors: int
    call_errors: int
    agents: dict[str, int]
    prompt_tokens: int
    response_tokens: int
    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A tool that a message calls; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message. `cut` is the number of its characters that are not shown."""

    role: str
    text: str
    cut: int = 0
    reasoning: str = ""
    calls: list[ToolUse] = field(default_factory=list)
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRow:
    """A reward with its source."""

    value: float
    source: str
    agent: str | None
    span_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A span in its place.

    Attributes:
        span_id: its id.
        parent_id: of the span around it; None for a root.
        operation: ``chat``, ``execute_tool``, ``invoke_agent``, ...
        name: the tool, the agent, the model.
        agent: at work.
        start_ms: since the attempt's first span.
        ms: that it took.
        depth: spans around it.
        error: why it failed.
        turn: of a call: its number among the calls.
        known: of a call: messages of its prompt that an earlier call had, which are not in `said`.
        said: of a call: what is new in its prompt; of a tool: its arguments.
        answer: of a call: what was answered, one for each choice; of a tool: its result.
        prompt_tokens: of a call; None where not recorded.
        response_tokens: likewise.
        version: of the weights.
        model: that answered.
        finish: why the answer ended.
        rewards: tied to this span.
        credit: the call's share of the rewards.
        advantage: how much better it was than what it was compared with.
        left_out: why it was not compared.
    """

    span_id: str
    parent_id: str | None
    operation: str
    name: str
    agent: str | None
    start_ms: float
    ms: float
    depth: int
    error: str | None = None
    turn: int | None = None
    known: int = 0
    said: list[Said] = field(default_factory=list)
    answer: list[Said] = field(default_factory=list)
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    version: int | None = None
    model: str | None = None
    finish: str | None = None
    rewards: list[RewardRow] = field(default_factory=list)
    credit: float | None = None
    advantage: float | None = None
    left_out: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One try at a rollout."""

    attempt_id: str
    number: int
    status: str
    worker: str
    error: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """An attempt as it went. `task_json` is the whole task, as a line of a data file."""

    rollout_id: str | None
    attempt_id: str | None
    group_id: str | None
    mode: str | None
    step: int | None
    task: str
    task_json: str | None
    status: str
    reward: float | None
    attempts: list[AttemptRow]
    members: list[str]
    agents: list[str]
    rewards: list[RewardRow]
    events: list[Event]
    unjoined: dict[str, int]
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rollout beside the others of its group, with the mean advantage of each agent's calls."""

    row: RolloutRow
    rewards: list[RewardRow]
    advantages: dict[str, float]
    events: list[Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPage:
    """Some members of a group side by side; `alike` leading calls are the same in all of them."""

    group_id: str
    mode: str
    step: int | None
    task: str
    alike: int
    mean: float | None
    deviation: float | None
    members: list[Member]
    total: int
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token. All but its id and text is known of sampled ones alone, and there only where it was recorded.

    Attributes:
        id: in the vocabulary.
        text: that it stands for.
        logprob: natural log-probability with which the engine drew it.
        trained: whether the loss looks at it.
        advantage: what it is pushed by.
        gap: log-probability under the trainer less `logprob`, as the update saw it.
        entropy: in nats, of the distribution that it was drawn from, as the update saw it.
    """

    id: int
    text: str
    logprob: float | None = None
    trained: bool | None = None
    advantage: float | None = None
    gap: float | None = None
    entropy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChoice:
    """One answer of a call, as tokens and as the message that the program got."""

    index: int
    finish: str | None
    message: Said
    tokens: list[Token]
    credit: float | None
    advantage: float | None
    left_out: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """The training row that a call is in: `calls` share it, by their span ids."""

    calls: list[str]
    tokens: int
    trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPage:
    """A model call. `untrained` says why it is in no training row, `unread` why no update saw its tokens."""

    rollout_id: str | None
    attempt_id: str | None
    span_id: str
    agent: str | None
    turn: int
    turns: list[str]
    model: str | None
    version: int | None
    error: str | None
    ms: float
    texts: bool
    prompt: list[Token]
    prompt_total: int
    choices: list[CallChoice]
    messages: list[Said]
    sampling: dict[str, Any]
    row: RowPlace | None
    untrained: str | None
    unread: str | None
    rewards: list[RewardRow]
    request: str
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLink:
    """A call that something is said about."""

    rollout_id: str
    attempt_id: str
    span_id: str
    agent: str | None
    turn: int
    credit: float | None = None
    advantage: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Calls that were left out for a reason, and some of them."""

    reason: str
    calls: int
    links: list[CallLink]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountPage:
    """From calls seen to calls trained. `losses` add up to the difference."""

    step: int
    seen: int
    trained: int
    rows: int
    merged: int
    rows_without_gradient: int
    tokens: int
    tokens_in_rows: int
    tokens_steered: int
    losses: list[Loss]
    continued: int
    not_continued: dict[str, int]
    unclaimed: dict[str, int]
    joined: int
    unjoined: dict[str, int]
    same_as_run: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCell:
    """The calls of an agent at a turn."""

    agent: str | None
    turn: int
    calls: int
    credit: float | None
    contrast: float | None
    better: float
    worse: float
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditPage:
    """Credit by agent and turn, and the best and worst calls."""

    credit: str
    credits: list[str]
    cells: list[TurnCell]
    best: list[CallLink]
    worst: list[CallLink]
    lines: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """What one source gave."""

    source: str
    rule: bool
    rewards: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """An attempt's rewards by source: a point of the scatter. `attempt_id` and the span tell where to look."""

    rollout_id: str
    attempt_id: str
    outcome: float | None
    by_source: dict[str, float]
    span_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsPage:
    """Rewards of a step by source."""

    sources: list[SourceRow]
    attempts: list[Judgement]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRow:
    """A tool, over the rollouts that were looked at."""

    tool: str
    agent: str | None
    calls: int
    errors: int
    repeated: int
    ms_median: float
    ms_slowest: float
    error: str | None
    slowest: CallLink | None
    failed: CallLink | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsPage:
    """Tools of a step."""

    rollouts: int
    tools: list[ToolRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A runner's worker, from the attempts that it claimed."""

    worker: str
    attempts: int
    running: int
    status: dict[str, int]
    last_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRow:
    """An attempt under way; `lease_s` is what is left of its lease as far as the store's clock tells."""

    rollout_id: str
    attempt_id: str
    worker: str
    seconds: float
    limit_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPage:
    """Runners, queue and attempts under way."""

    queued: int
    running: int
    workers: list[WorkerRow]
    oldest: list[RunningRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseRow:
    """A trace outside of any rollout, as an attached program records it."""

    trace_id: str
    name: str
    origin: str
    start_s: float
    spans: int
    calls: int
    errors: int
    agents: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoosePage:
    """Some traces, the newest first."""

    traces: list[LooseRow]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A span or call in which a text was found."""

    rollout_id: str | None
    attempt_id: str | None
    trace_id: str | None
    span_id: str | None
    name: str
    agent: str | None
    before: str
    match: str
    behind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """Where a text was found so far; `next` is where to go on, None when everything was looked through."""

    hits: list[Hit]
    looked: int
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedGroup:
    """A task at one time: `name` is that of the batch, `mean` over the rollouts that succeeded and were rewarded."""

    group_id: str
    mode: str
    step: int
    name: str
    rollouts: int
    mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedTask:
    """A task and its groups, the oldest first."""

    task: str
    groups: list[TriedGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesPage:
    """Tasks that were run at several times. `commands` run the one asked for anew, with tuned and base model."""

    tasks: list[TriedTask]
    total: int
    next: int | None
    commands: list[str]
