"""A replay: a new attempt that gets an earlier one's answers, up to a call or to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

ToolPolicy: TypeAlias = Literal["replay", "run", "refuse"]

ENDED: Final = "the replay ended: "  # how the error of an attempt begins that differed from its record
DIFFERS: Final = "replay_differs"  # code of the error for all its later calls
REPLAYED: Final = "replayed"  # in the sampling of a call that was answered from the record: the recorded call's id
COUPLED: Final = "coupled"  # likewise, true if it came after the forked call
FORKED: Final = "forked"  # in the sampling of the call that was sampled again: the recorded call's id


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Which earlier attempt is replayed, how far, and what happens after.

    Attributes:
        attempt_id: the record: the earlier attempt whose answers are returned.
        call: number of the call that is sampled again, from 0 in the order of start, as in `Trace.chats`. None: none,
            the whole record is replayed.
        coupled: after that call, a request equal to a recorded one is answered from the record, too.
        beyond: what happens to a request that is not in the record, if `call` is None: it ends the replay, or it is
            sampled and the program continues.
        fresh: names or globs of agents whose calls are never answered from the record, if `call` is None: those of a
            model that is tested, or of one that replaces the agents' trained weights.
        tools: what happens to tool calls: the recorded result is returned; they run; or those that are not recorded are
            refused. See `gateway.replay.session`.
        run_tools: names or globs of tools that always run.
        refuse_tools: names or globs of tools that never run.
        say: text returned instead of the answer of `call`.
        model: policy or upstream of the server that answers `call`, or if that is None the calls of `fresh`, and no
            other.
            None: the model that answers the agent without a replay.
        draw: number of the alternative; the sampling seed follows from it.
        weight: of its outcome in an update, if calls are not equally likely to be forked.
    """

    attempt_id: str
    call: int | None = None
    coupled: bool = True
    beyond: Literal["end", "sample"] = "end"
    fresh: tuple[str, ...] = ()
    tools: ToolPolicy = "replay"
    run_tools: tuple[str, ...] = ()
    refuse_tools: tuple[str, ...] = ()
    say: str | None = None
    model: str | None = None
    draw: int = 0
    weight: float = 1.0
