"""From a store to files: read once, choose, and write complete files or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lightning_spans.errors import ConfigError, DataError
from lightning_spans.schema.agents import check_known, check_spelling, unheard
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store
from lightning_spans.store.protocol import Where, each
from lightning_trainer.kits.export import choose, pairs
from lightning_trainer.kits.export.candidates import LineCandidate, lines_of
from lightning_trainer.kits.export.episodes import StoredEpisode, episodes
from lightning_trainer.kits.export.files import Draft, Line, LineSpool
from lightning_trainer.kits.export.wanted import ExportSelection
from lightning_trainer.lineage.permits import tenants_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The chosen lines. They can be read while the store's block is open.

    Attributes:
        training: the training lines, read again in each call.
        held_out: those of held-out tasks.
        left_out: model calls that are in neither, by reason (for `openinference`: spans).
    """

    training: Callable[[], Iterator[Line]]
    held_out: Callable[[], Iterator[Line]]
    left_out: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The result of an export.

    Attributes:
        lines: number in the file.
        held_out: number in the file of held-out tasks.
        left_out: calls that are in no line, by reason.
        with_tokens: number of lines with the recorded tokens.
        files: written files.
    """

    lines: int
    held_out: int
    left_out: dict[str, int]
    with_tokens: int
    files: tuple[Path, ...] = field(default=())


def export(store: Store, wanted: ExportSelection, out: Path) -> ExportResult:
    """Write the selected lines of a store.

    Args:
        store: store to read.
        wanted: which lines.
        out: JSON Lines file; replaced if it exists. Held-out lines go into ``NAME.held-out.jsonl`` next to it.

    Raises:
        DataError: there is nothing to write; no file is written then.
        ConfigError: a file cannot be written, or is not a .jsonl file.
        UnknownAgentError: a named agent is not in the store.
    """
    if out.suffix != ".jsonl":
        raise ConfigError(f"{out}: the file holds JSON Lines. Give it a name that ends with .jsonl.")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. Give the name of a file.")
    beside = out.with_suffix(".held-out.jsonl")
    if beside.exists() and not wanted.held_out:
        raise ConfigError(
            f"{beside} "
            f"was held out from another export, and {out} could then contain its lines. Give --split, choose another"
            " name, or delete it."
        )
    with open_selection(store, wanted) as chosen, ExitStack() as stack:
        files = [stack.enter_context(closing(Draft(out)))]
        if wanted.held_out:
            files.append(stack.enter_context(closing(Draft(beside))))
        with_tokens: Counter[bool] = Counter()
        for draft, lines in zip(files, (chosen.training, chosen.held_out), strict=False):
            draft.write(_count_lines(_columns_first(lines), with_tokens))
        if not files[0].lines:
            elsewhere = _origins(store) if wanted.origin is not None and not chosen.left_out else set[str]()
            raise DataError(_nothing(chosen, wanted, files[-1].lines if wanted.held_out else 0, elsewhere))
        for draft in files:
            draft.end()
        for draft in files:
            draft.name()
        return ExportResult(
            lines=files[0].lines,
            held_out=files[1].lines if wanted.held_out else 0,
            left_out=dict(sorted(chosen.left_out.items())),
            with_tokens=with_tokens[True],
            files=tuple(draft.path for draft in files),
        )


@contextmanager
def open_selection(store: Store, wanted: ExportSelection) -> Iterator[Selection]:
    """Read a store and choose the lines.

    Raises:
        UnknownAgentError: a named agent is not in the store.
    """
    left_out: Counter[str] = Counter()
    seen = _StoreNotes()
    with LineSpool() as spool:
        if wanted.format == "openinference":
            from lightning_trainer.kits.export.spans import spans_of

            places = [
                spool.add(line)
                for each in _note_contents(store, wanted, seen)
                for line in spans_of(each, wanted, left_out)
            ]
            _check(wanted, seen)
            yield _selection(spool, (places, []), left_out)
            return
        candidates = [
            LineCandidate(place=spool.add(line), **known)
            for episode in _note_contents(store, wanted, seen)
            for line, known in lines_of(episode, wanted, left_out)
        ]
        _check(wanted, seen)
        wanted.permits.check_tenants(seen.tenants)
        kept = choose.by_reward(candidates, wanted, left_out)
        parts = choose.split(kept, wanted, left_out, seen.played)
        if wanted.format == "dpo":
            training, held_out = (pairs.pairs(part, wanted, left_out) for part in (parts.training, parts.held_out))
            yield Selection(
                training=lambda: pairs.lines_of(training, spool),
                held_out=lambda: pairs.lines_of(held_out, spool),
                left_out=left_out,
            )
            return
        # Equal lines are removed in each part separately: the better one may be held out, or of a validation.
        training_once, held_out_once = (choose.once(part, left_out) for part in (parts.training, parts.held_out))
        yield _selection(spool, (_places(training_once), _places(held_out_once)), left_out)


@dataclass(frozen=True, slots=True)
class _PlayedTask:
    """The fields of an attempt that identify its task."""

    group: str
    task: str | None
    opening: str | None
    validation: bool


@dataclass(frozen=True, slots=True)
class _StoreNotes:
    """Values collected while a store is read: agent paths, attempts, fields of tasks, tenants of the traces used."""

    agents: set[str] = field(default_factory=set)
    played: list[_PlayedTask] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)

    def note(self, episode: StoredEpisode) -> None:
        if episode.problem is None:
            self.tenants.update(tenants_of(episode.trace))
        paths = (*episode.trace.agent_paths, *(call.path for call in episode.calls))
        self.agents.update(path for path in paths if path is not None)
        self.played.append(_PlayedTask(episode.group, episode.task, episode.opening, episode.validation))
        self.fields.update(() if episode.attempt is None else episode.attempt.rollout.task)


def _note_contents(store: Store, wanted: ExportSelection, seen: _StoreNotes) -> Iterator[StoredEpisode]:
    """Read episodes, and collect their values."""
    for episode in episodes(store, wanted):
        seen.note(episode)
        yield episode


def _selection(spool: LineSpool, places: tuple[list[int], list[int]], left_out: Counter[str]) -> Selection:
    training, held_out = places
    return Selection(
        training=lambda: map(spool.get, training), held_out=lambda: map(spool.get, held_out), left_out=left_out
    )


def _check(wanted: ExportSelection, seen: _StoreNotes) -> None:
    if wanted.agents is not None and seen.agents:
        heard = len(unheard(wanted.agents, seen.agents)) < len(wanted.agents)
        (check_spelling if wanted.some_silent and heard else check_known)(wanted.agents, seen.agents)
    unknown = [name for name in wanted.task_fields or () if name not in seen.fields]
    if unknown and seen.played:
        known = ", ".join(sorted(seen.fields)) or "none"
        raise ConfigError(f"--split-by: no task has the field {', '.join(unknown)}. Fields of the tasks: {known}.")


def _places(candidates: Sequence[LineCandidate]) -> list[int]:
    return [each.place for each in candidates]


def _columns_first(lines: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """Return the lines that fill in a new field first, because readers take columns from a file's beginning.

    `datasets` reads 10 MB for that, and rejects the file if a later line has more fields.
    """
    seen, early = set[str](), set[int]()
    for place, line in enumerate(lines()):
        if new := set(_filled_fields(line)) - seen:
            seen |= new
            early.add(place)
            yield line
    yield from (line for place, line in enumerate(lines()) if place not in early)


def _filled_fields(value: object, name: str = "") -> Iterator[str]:
    """Return the names of the fields that are not empty, in objects and in lists of objects."""
    if isinstance(value, dict):
        for key, each in value.items():
            if each is not None:
                yield f"{name}.{key}"
                yield from _filled_fields(each, f"{name}.{key}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for each in value:
            yield from _filled_fields(each, name)


def _count_lines(lines: Iterable[Line], with_tokens: Counter[bool]) -> Iterator[Line]:
    for line in lines:
        with_tokens["input_ids" in line or "prompt_ids" in line] += 1
        yield line


def _origins(store: Store) -> set[str]:
    """Return the origins of a store's spans and calls."""
    spans, calls = each(store, Span, Where()), each(store, Call, Where())
    return {span.origin for span in spans} | {call.origin for call in calls}


def _nothing(chosen: Selection, wanted: ExportSelection, held_out: int, elsewhere: set[str]) -> str:
    if held_out:
        return f"all {held_out} lines are held out, so no training line is left. Give a smaller --split."
    if elsewhere:
        return f"this store has no traces of the origin {wanted.origin!r}. It has: {', '.join(sorted(elsewhere))}."
    if not chosen.left_out:
        return "this store has no model call to export. lightning-rl traces --store URL lists what a store has"
    why = "\n".join(f"  {count}: {reason}" for reason, count in chosen.left_out.most_common())
    return f"there is nothing to export: every model call is left out.\n{why}"
