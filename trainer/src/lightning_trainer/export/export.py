"""From a store to files: read once, choose, write whole files or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lightning_spans.errors import ConfigError, DataError
from lightning_spans.schema.agents import check_known
from lightning_spans.store import Store
from lightning_trainer.export import choose, pairs
from lightning_trainer.export.candidates import Candidate, lines_of
from lightning_trainer.export.episodes import Episode, episodes
from lightning_trainer.export.files import Draft, Line, Spool
from lightning_trainer.export.wanted import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Lines that were chosen. They can be read while the store's block is open.

    Attributes:
        training: the lines to learn from, read anew each time.
        held_out: those of held-out tasks.
        left_out: model calls that are in none, by reason (of `openinference`: spans).
    """

    training: Callable[[], Iterator[Line]]
    held_out: Callable[[], Iterator[Line]]
    left_out: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        lines: in the file.
        held_out: in the file of held-out tasks.
        left_out: calls that are in no line, by reason.
        with_tokens: lines that hold the recorded tokens.
        files: that were written.
    """

    lines: int
    held_out: int
    left_out: dict[str, int]
    with_tokens: int
    files: tuple[Path, ...] = field(default=())


def export(store: Store, wanted: Wanted, out: Path) -> Exported:
    """Write what is wanted of a store.

    Args:
        store: is read.
        wanted: which lines.
        out: JSON Lines file; replaced where it is there. Held-out lines go into ``NAME.held-out.jsonl`` beside it.

    Raises:
        DataError: there is nothing to write; nothing is written then.
        ConfigError: a file can't be written, or is no .jsonl file.
        UnknownAgentError: an agent was named that the store has not seen.
    """
    if out.suffix != ".jsonl":
        raise ConfigError(f"{out}: the file holds JSON Lines. Give it a name that ends with .jsonl.")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. Give the name of a file.")
    with selected(store, wanted) as chosen, ExitStack() as stack:
        files = [stack.enter_context(closing(Draft(out)))]
        if wanted.held_out:
            files.append(stack.enter_context(closing(Draft(out.with_suffix(".held-out.jsonl")))))
        with_tokens: Counter[bool] = Counter()
        for draft, lines in zip(files, (chosen.training, chosen.held_out), strict=False):
            draft.write(_counted(lines(), with_tokens))
        if not files[0].lines:
            raise DataError(_nothing(chosen, held_out=files[-1].lines if wanted.held_out else 0))
        for draft in files:
            draft.finish()
        return Exported(
            lines=files[0].lines,
            held_out=files[1].lines if wanted.held_out else 0,
            left_out=dict(sorted(chosen.left_out.items())),
            with_tokens=with_tokens[True],
            files=tuple(draft.path for draft in files),
        )


@contextmanager
def selected(store: Store, wanted: Wanted) -> Iterator[Selection]:
    """Read a store and choose the lines.

    Raises:
        UnknownAgentError: an agent was named that the store has not seen.
    """
    left_out: Counter[str] = Counter()
    seen: set[str] = set()
    with Spool() as spool:
        if wanted.format == "openinference":
            from lightning_trainer.export.spans import spans_of

            places = [
                spool.add(line) for each in _noted(store, wanted, seen) for line in spans_of(each, wanted, left_out)
            ]
            _check(wanted, seen)
            yield _selection(spool, (places, []), left_out)
            return
        candidates = [
            Candidate(place=spool.add(line), **known)
            for episode in _noted(store, wanted, seen)
            for line, known in lines_of(episode, wanted, left_out)
        ]
        _check(wanted, seen)
        kept = choose.by_reward(candidates, wanted, left_out)
        if wanted.format != "dpo":
            kept = choose.once(kept, left_out)
        parts = choose.split(kept, wanted, left_out)
        if wanted.format == "dpo":
            training, held_out = (pairs.pairs(part, wanted, left_out) for part in (parts.training, parts.held_out))
            yield Selection(
                training=lambda: pairs.lines_of(training, spool),
                held_out=lambda: pairs.lines_of(held_out, spool),
                left_out=left_out,
            )
            return
        yield _selection(spool, (_places(parts.training), _places(parts.held_out)), left_out)


def _noted(store: Store, wanted: Wanted, seen: set[str]) -> Iterator[Episode]:
    """Read episodes, and note the agents in them."""
    for episode in episodes(store, wanted):
        seen.update(name for name in (*episode.trace.agent_paths, *(c.path for c in episode.calls)) if name is not None)
        yield episode


def _selection(spool: Spool, places: tuple[list[int], list[int]], left_out: Counter[str]) -> Selection:
    training, held_out = places
    return Selection(
        training=lambda: map(spool.get, training), held_out=lambda: map(spool.get, held_out), left_out=left_out
    )


def _check(wanted: Wanted, seen: set[str]) -> None:
    if wanted.agents is not None and seen:
        check_known(wanted.agents, seen)


def _places(candidates: Sequence[Candidate]) -> list[int]:
    return [each.place for each in candidates]


def _counted(lines: Iterable[Line], with_tokens: Counter[bool]) -> Iterator[Line]:
    for line in lines:
        with_tokens["input_ids" in line or "prompt_ids" in line] += 1
        yield line


def _nothing(chosen: Selection, held_out: int) -> str:
    if held_out:
        return f"all {held_out} lines are held out, and none is left to learn from. Give a smaller --split."
    if not chosen.left_out:
        return (
            "this store holds no model call, so there is nothing to export. Which stores hold some: lightning-rl traces"
        )
    why = "\n".join(f"  {count}: {reason}" for reason, count in chosen.left_out.most_common())
    return f"there is nothing to export: every model call is left out.\n{why}"
