"""A replay: a new attempt that gets an earlier one's answers, up to a call or to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

ToolPolicy: TypeAlias = Literal["replay", "run", "refuse"]

ENDED: Final = "the replay ended: "  # how the error begins of an attempt that was not as its record
DIFFERS: Final = "replay_differs"  # code of what its calls are answered from then on
REPLAYED: Final = "replayed"  # in the sampling of a call that was answered from the record: the recorded call's id
COUPLED: Final = "coupled"  # likewise, true where it came after the forked call
FORKED: Final = "forked"  # in the sampling of the call that was made anew: the recorded call's id


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Which earlier attempt is replayed, how far, and what happens after.

    Attributes:
        attempt_id: the record: the earlier attempt whose answers are given.
        call: number of the call that is made anew, from 0 in the order of start, as `Trace.chats` has them. None: there
            is none, the whole record is replayed.
        coupled: after that call a request equal to one of the record is answered from it, too.
        beyond: what becomes of a request that is not in the record, where `call` is None: it ends the replay, or it is
            drawn and the program goes on.
        fresh: names or globs of agents whose calls are never answered from the record, where `call` is None: those of
            a model that is tried, or of one that stands in for what the agents learned.
        tools: what becomes of tool calls: the recorded result is given; they are run; those are refused that are not
            recorded. See `gateway.replay.session`.
        run_tools: names or globs of tools that are always run.
        refuse_tools: names or globs of tools that are never run.
        say: text given in place of the answer of `call`.
        model: policy or upstream of the server that answers `call`, or where that is None the calls of `fresh`, and no
            other. None: what answers the agent without a replay.
        draw: number of the alternative; the seed of what is drawn follows from it.
        weight: of what comes of it in an update, where calls are not equally likely to be forked.
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
