"""Conversations of files and stores, in all common formats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import DataError
from lightning_spans.schema.agents import path_of
from lightning_spans.schema.json import read_json
from lightning_trainer.kits.export.asked import UnreadableError
from lightning_trainer.kits.export.chat import Message, plain
from lightning_trainer.kits.sft.reasons import UnlearnedReason
from lightning_trainer.lineage.permits import split_tenants
from lightning_trainer.run.datafiles.arrow import arrow_rows
from lightning_trainer.run.datafiles.rows import DataRow, FaultyRows, json_lines, json_list

_ROLES: Final = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "developer": "system",
}  # fmt: skip
PROVENANCE: Final = ("call_ids", "reward_ids", "rollout_id", "attempt_id", "trace_id", "origin", "tenant")
_SHOWN: Final = 5  # files of a folder that an error lists
WANTED: Final = (
    "messages (role, content), conversations (from, value), prompt and completion, instruction and output, or input_ids"
    " and labels"
)
_FIELDS: Final = frozenset({  # all fields that are read; other columns of a file may have any type
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "system", "tools",
    "chosen", "rejected", "rewards", "input_ids", "labels", "prompt_ids", "chosen_ids", "rejected_ids", "answers",
    "agent", "agent_path", "reward", "group_id", "rollout_id", "task_id", "attempt_id", "trace_id", "call_ids",
    "reward_ids", "origin", "tenant", "chosen_from", "rejected_from",
})  # fmt: skip
_CALL: Final = "function_call"  # a turn in ShareGPT's format
_SHAPES: Final = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})


class SilentError(DataError):
    """A conversation has no answer to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A training example.

    Attributes:
        messages: of the conversation; empty if only tokens are known.
        answers: indices of the messages to learn.
        tools: that were offered.
        ids: (T,) recorded tokens; None if there are none.
        labels: (T,) the same tokens, but below 0 for those that are not learned.
        agent: that gave the answers; None if the data does not name it.
        agent_path: path of the agent, outermost first; None if it is the name alone.
        reward: of the answers; None if unknown.
        group: of rollouts sampled for one task; None if unknown.
        task: id of the task, the same in every run; None if unknown.
        source: file and line.
        provenance: ids of the records that it was made of, by field name of the line; empty if the line names none.
    """

    messages: tuple[Message, ...]
    answers: tuple[int, ...]
    tools: tuple[Any, ...] = ()
    ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    agent: str | None = None
    agent_path: str | None = None
    reward: float | None = None
    group: str | None = None
    task: str | None = None
    source: str = ""
    provenance: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def path(self) -> str | None:
        """The path of its agent, which names and globs are matched against; None if the data names no agent."""
        return None if self.agent is None else path_of(self.agent, self.agent_path)

    @property
    def tenants(self) -> set[str]:
        """The tenants of the live trace that it was made of, if `export` wrote the line."""
        texts = self.provenance.get("tenant", ()) if "origin" in self.provenance else ()
        return {name for text in texts for name in split_tenants(text)}

    @property
    def needs_permit(self) -> bool:
        """Whether `export` wrote the line from a live trace. Outside of attempts, it writes the trace's id for both."""
        known = self.provenance
        trace_id = known.get("trace_id")  # a file of another's may have a field `origin` of its own
        return "origin" in known and trace_id is not None and known.get("attempt_id") == trace_id


def is_store(name: str) -> bool:
    """Whether this names a store instead of a data file."""
    return "://" in name or Path(name).suffix in (".db", ".sqlite", ".sqlite3")


def read_file(path: Path, left_out: Counter[str]) -> list[Example]:
    """Read a file; the suffix of its name gives the format.

    Args:
        path: of the file.
        left_out: counts conversations without an answer of the assistant, such as truncated ones.

    Raises:
        DataError: the file is missing, empty or of another format, a line of it has no known format, or no conversation
            contains an answer of the assistant.
    """
    found, silent = [], None
    for row, faulty in read_rows(path):
        try:
            found.append(conversation(row.value, f"{path}, {row.where}"))
        except SilentError as error:
            silent = silent or error
            left_out[UnlearnedReason.SILENT] += 1
        except DataError as error:
            faulty.reject(row, str(error).removeprefix(f"{path}, {row.where}: "))
    if not found:
        raise silent or DataError(f"data file {path} is empty. It must hold at least one conversation.")
    return found


def read_rows(path: Path) -> Iterator[tuple[DataRow, FaultyRows]]:
    """Read the objects of a file, each with the counter of rows that are left out.

    Raises:
        DataError: the file is missing, of another format, or most of its rows cannot be read.
    """
    if path.is_dir():
        raise DataError(f"data {path} is a folder. Name a .jsonl, .json or .parquet file, or a store.{_files_in(path)}")
    reader = _readers().get(path.suffix.lower())
    if reader is None:
        raise DataError(f"data file {path}: unknown kind {path.suffix!r}. Give .jsonl, .json or .parquet, or a store.")
    if not path.exists():
        raise DataError(f"data file {path} does not exist. Check the path; it is relative to {Path.cwd()}.")
    faulty = FaultyRows(path)
    for row in faulty.readable(reader(path)):
        yield row, faulty
    faulty.finish()


def _readers() -> dict[str, Callable[[Path], Iterator[DataRow]]]:
    return {
        ".jsonl": json_lines,
        ".ndjson": json_lines,
        ".json": json_list,
        ".parquet": partial(arrow_rows, needed=_FIELDS, sparse=True),
    }


def _files_in(folder: Path) -> str:
    """List the first few data files in a folder, such as a data set's, for an error message."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _readers() and path.is_file())
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f" It holds {', '.join(path.relative_to(folder).as_posix() for path in found[:_SHOWN])}{more}."


def conversation(line: Mapping[str, Any], source: str) -> Example:
    """Read one line.

    Raises:
        SilentError: it contains no answer of the assistant to learn.
        DataError: it has none of the known fields, or they contain something else.
    """
    try:
        messages, answers = _messages_and_places(line)
        ids, labels = _tokens(line)
        if any(not 0 <= at < len(messages) or messages[at]["role"] != "assistant" for at in answers):
            raise ValueError(f"answers are {answers}, which are not indices of the assistant's messages")
        if answers != sorted(set(answers)):
            raise ValueError(f"answers are {answers}, which are not in ascending order without repetition")
        if ids is None and not answers:
            raise SilentError(f"{source}: {UnlearnedReason.SILENT}: {list_fields(line)}. Expected: {WANTED}.")
        return Example(
            messages=tuple(messages),
            answers=tuple(answers),
            tools=_tools(line.get("tools")),
            ids=ids,
            labels=labels,
            agent=line.get("agent") if isinstance(line.get("agent"), str) else None,
            agent_path=line.get("agent_path"),
            reward=_reward(line.get("reward")),
            group=next(filter(None, (_name(line.get(key)) for key in ("group_id", "rollout_id"))), None),
            task=_name(line.get("task_id")),
            source=source,
            provenance=_provenance(line),
        )
    except (UnreadableError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{source}: {error}. It has {list_fields(line)}. Expected: {WANTED}.") from None


def _provenance(line: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the ids that `export` writes into a line.

    In a user's own file, fields of these names may contain anything.
    """
    listed = {name: value if isinstance(value := line.get(name), list) else [value] for name in PROVENANCE}
    found = {name: tuple(one for one in values if isinstance(one, str)) for name, values in listed.items()}
    return {name: values for name, values in found.items() if values}


def _name(value: Any) -> str | None:
    """Return the name of a task or a group: a text or an integer."""
    return str(value) if isinstance(value, str) or type(value) is int else None


def _reward(value: Any) -> float | None:
    if not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value):
        raise ValueError(f"reward is {value}")
    return value


def list_fields(line: Mapping[str, Any]) -> str:
    """List the fields of a line, for an error message."""
    return f"the fields {', '.join(sorted(map(str, line)))}" if line else "no fields"


def _messages_and_places(line: Mapping[str, Any]) -> tuple[list[Message], list[int]]:
    """Return the messages of a line, and the indices of those to learn. A separate system prompt comes first."""
    messages, answers = _turns(line)
    system = line.get("system")
    if not system or (messages and messages[0]["role"] == "system"):
        return messages, answers
    return [*to_messages(system, "system"), *messages], [place + 1 for place in answers]


def _turns(line: Mapping[str, Any]) -> tuple[list[Message], list[int]]:
    if line.get("messages"):
        sent = [_object(message) for message in line["messages"]]
        messages = [plain(message) for message in sent]
        given = line.get("answers")
        return messages, _learned_places(messages, sent) if given is None else [int(place) for place in given]
    if line.get("conversations"):
        turns = [_turn(_object(turn)) for turn in line["conversations"]]
        messages = [plain(turn) for turn in turns]
        return messages, _learned_places(messages, turns)
    if line.get("prompt") and line.get("completion"):
        asked = to_messages(line["prompt"], "user")
        messages = [*asked, *to_messages(line["completion"], "assistant")]
        return messages, [place for place in _learned_places(messages, messages) if place >= len(asked)]
    if line.get("output") and (line.get("instruction") or line.get("input")):
        asked_text = "\n\n".join(str(line[name]) for name in ("instruction", "input") if line.get(name))
        before = [said for turn in line.get("history") or () for said in _exchange(*turn)]
        messages = [*before, *to_messages(asked_text, "user"), *to_messages(line["output"], "assistant")]
        return messages, [len(messages) - 1]
    if line.get("input_ids") is not None and line.get("labels") is not None:
        return [], []
    if any(shape <= line.keys() for shape in _SHAPES):  # known format, but empty
        return [], []
    raise ValueError("nothing here is known")


def _learned_places(messages: Sequence[Message], given: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of answers, except empty ones and those of weight 0, as in OpenAI's fine-tuning.

    Args:
        messages: as templates accept them.
        given: the same messages as in the line.
    """
    said = (
        place for place in answer_places(messages) if messages[place]["content"] or messages[place].get("tool_calls")
    )
    return [place for place in said if given[place].get("weight") != 0]


def _exchange(asked: str, answered: str) -> list[Message]:
    return [*to_messages(asked, "user"), *to_messages(answered, "assistant")]


def _turn(turn: Mapping[str, Any]) -> Message:
    """Return a turn in ShareGPT's format; a turn with a role is accepted too."""
    if "role" in turn:
        return dict(turn)
    if str(turn["from"]).lower() == _CALL:
        return {"role": "assistant", "content": None, "tool_calls": _calls(turn["value"]), "weight": turn.get("weight")}
    role = _ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise ValueError(f"a turn is from {turn['from']!r}, which is not a known role")
    return {"role": role, "content": turn["value"], "weight": turn.get("weight")}


def _calls(value: Any) -> list[Message]:
    """Return the calls in a turn from `function_call`: one or a list, as JSON text or as data."""
    read = read_json(value) if isinstance(value, str) else value
    calls = read if isinstance(read, list) else [read]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"a turn from {_CALL!r} must be JSON with a name and arguments, not {str(value)[:40]!r}")
    return [
        {"type": "function", "function": {name: call.get(name) for name in ("name", "arguments")}} for call in calls
    ]


def _object(value: Any) -> Any:
    """Return a message as data; `datasets` stores some as JSON text, in a column of its type `Json`."""
    return read_json(value) if isinstance(value, str) and value.lstrip().startswith("{") else value


def to_messages(value: Any, role: str) -> list[Message]:
    """Return messages unchanged, and a text as one message of this role.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{repr(value)[:40]} is neither text nor messages")
    return [plain(_object(message)) for message in value]


def answer_places(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages, including empty ones."""
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _tools(value: Any) -> tuple[Any, ...]:
    tools = read_json(value) if isinstance(value, str) and value else value
    if isinstance(tools, (list, tuple)):
        tools = [_tool(_object(tool)) for tool in tools]
    if tools and not (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("tools is not a list of objects")
    return tuple(tools) if tools else ()


def _tool(tool: Any) -> Any:
    """Return a tool in OpenAI's format; ShareGPT's conversations give only the function."""
    bare = isinstance(tool, Mapping) and "function" not in tool and isinstance(tool.get("name"), str)
    return {"type": "function", "function": tool} if bare else tool


def _tokens(line: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    ids, labels = line.get("input_ids"), line.get("labels")
    if ids is None or labels is None:
        return None, None
    if len(ids) != len(labels):
        raise ValueError(f"{len(ids)} input_ids, but {len(labels)} labels")
    if any(type(each) is not int for each in (*ids, *labels)):
        raise ValueError("input_ids and labels must be integers")
    if any(label >= 0 and label != token for token, label in zip(ids, labels, strict=True)):
        raise ValueError("a label must be negative or equal to the input id at its position")
    return tuple(ids), tuple(labels)


def read_lines_of_store(lines: Iterable[Mapping[str, Any]], name: str) -> list[Example]:
    """Read the lines that `lightning_trainer.kits.export` selected from a store."""
    return [conversation(line, f"{name}, line {number}") for number, line in enumerate(lines, 1)]
