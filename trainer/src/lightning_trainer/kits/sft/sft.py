"""`sft()`: read the data, open the learner, learn, and leave a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_spans.errors import ConfigError, DataError
from lightning_spans.schema.agents import unheard
from lightning_spans.store import open_store
from lightning_trainer import registry
from lightning_trainer.backend_protocol import Backend, Learner
from lightning_trainer.config.files import CONFIG_NAME, to_json
from lightning_trainer.config.origin import with_format
from lightning_trainer.kits.export.episodes import digest
from lightning_trainer.kits.export.export import open_selection
from lightning_trainer.kits.export.files import Line
from lightning_trainer.kits.export.wanted import ExportSelection
from lightning_trainer.kits.sft.batches import RowsToLearn, check_agents, make_rows, split_held_out
from lightning_trainer.kits.sft.config import SftConfig, with_current_names
from lightning_trainer.kits.sft.data import Example, is_store, read_file, read_lines_of_store
from lightning_trainer.kits.sft.dpo import BETA, Dpo, match_pairs
from lightning_trainer.kits.sft.fit import Fit, FitResult, schedule
from lightning_trainer.kits.sft.lineage import LineageWriter, sft_facts
from lightning_trainer.kits.sft.pairs import PreferencePair, read_pair, read_pairs
from lightning_trainer.kits.sft.reasons import UnlearnedReason
from lightning_trainer.kits.sft.render import Renderer
from lightning_trainer.kits.sft.resume import CHECKPOINT, began_with, forget, learning_folder
from lightning_trainer.kits.sft.resume import read as read_state
from lightning_trainer.kits.sft.standing import STATE_NAME, SavedState
from lightning_trainer.models import look
from lightning_trainer.options.learning import steps_of_epochs
from lightning_trainer.policies import parse
from lightning_trainer.report.metrics import MetricLog, write_atomically
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.rl.algorithms.likelihood import LIKELIHOOD
from lightning_trainer.rl.rows import Row
from lightning_trainer.run.interrupts import SavedInterrupt, defer_interrupts

_Line = TypeVar("_Line", Example, PreferencePair)
_EPOCHS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SftResult:
    """Result of `sft()`.

    Attributes:
        fitted: losses and steps.
        folder: of the run.
        checkpoint: a model folder; `train --model` and `serve` accept it.
        rows: number of rows learned from.
        held_out: number of held-out rows, for early stopping.
        recorded: number of rows, of both kinds, with the tokens that an engine recorded.
        left_out: conversations in no row, by reason.
    """

    fitted: FitResult
    folder: Path
    checkpoint: Path
    rows: int
    held_out: int
    recorded: int
    left_out: dict[str, int] = field(default_factory=dict)


def sft(config: SftConfig, progress: Progress | None = None, *, resume: Path | None = None) -> SftResult:
    """Learn from conversations.

    Args:
        config: the options; to resume, those that `config_to_resume` returned.
        progress: callback for progress events. Default: none.
        resume: folder of an interrupted run.

    Raises:
        LightningError: an option or a file is wrong, or there is nothing to learn. Then no folder is left.
        SavedInterrupt: the program was asked to stop; what was learned is saved.
    """
    progress = progress or Silent()
    backend: Backend = registry.by_name("backend", config.backend)
    look(config.model)  # raises if the model is not found
    if resume is None:
        _check_of_stores(config)
        config = with_format(config)
    data = read(config)
    config.permits.check_tenants(data.tenants)
    with ExitStack() as stack:
        check = stack.enter_context(defer_interrupts(progress.stopping))
        folder = stack.enter_context(learning_folder(config.out, resume))
        kept = SavedState(folder=folder, data=data.digest) if resume is None else SavedState.read(folder, data.digest)
        progress.phase(f"loading {config.model}")
        learner = stack.enter_context(closing(backend.learner(config.model, options_of(config))))
        progress.phase(f"writing {len(data.training)} conversations as tokens")
        task = _task(config, learner, data)
        steps = steps_of(config, len(task.rows))
        learner.schedule(*schedule(steps))
        kept.restore(learner)
        log = stack.enter_context(closing(MetricLog(folder, from_step=kept.standing.taken)))
        write_atomically(folder / CONFIG_NAME, to_json(config).encode())
        _tell(progress, task, config.agents)
        lineage = LineageWriter(folder, sft_facts(config), kept.standing.taken)
        lineage.learning_from(data.training, data.worse[0] if data.worse else ())
        fit = Fit(
            learner=learner, rows=task.rows, held_out=task.held_out, folder=folder, log=log, progress=progress,
            check=check, batch_size=config.batch_size, group_by_prefix=config.group_by_prefix, steps=steps,
            eval_every=config.eval_every, patience=config.patience, seed=config.seed, update=task.update,
            loss=task.loss, standing=kept.standing, keep=partial(kept.keep, learner), lineage=lineage,
        )  # fmt: skip
        try:
            fitted = fit.run()
        except SavedInterrupt:
            saved = (folder / CHECKPOINT).exists()
            what = f"what was learned is in {folder / CHECKPOINT}" if saved else "before anything was learned"
            then = f". Continue with: lightning-rl sft --resume {folder}" if (folder / STATE_NAME).exists() else ""
            raise SavedInterrupt(f"stopped: {what}{then}") from None
        forget(folder, STATE_NAME)
        return SftResult(
            fitted=fitted, folder=folder, checkpoint=folder / CHECKPOINT, rows=len(task.rows),
            held_out=len(task.held_out), recorded=task.recorded, left_out=dict(task.left_out),
        )  # fmt: skip


def config_to_resume(folder: Path, again: Mapping[str, Any] | None = None) -> SftConfig:
    """Return the options of a run to resume; see `began_with`.

    Raises:
        ConfigError: there is none, or an option that had a password is not given again.
    """
    read_state(folder, STATE_NAME)  # raises if there is no state
    return SftConfig(**with_current_names(began_with(folder, again)))


def options_of(config: SftConfig) -> dict[str, object]:
    """Return the learner's options: the configured ones, and the loss."""
    weights = "token-mean" if config.loss == "likelihood" else "sequence-sum"
    return {"loss_aggregation": weights, "algorithm": LIKELIHOOD, **config.learner_options()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data that was read.

    Attributes:
        training: examples to learn from; of pairs, the better answers.
        held_out: examples to evaluate.
        left_out: what stores left out and what is in neither part, by reason.
        worse: of pairs, the worse answers of `training` and of `held_out`.
    """

    training: list[Example]
    held_out: list[Example]
    left_out: Counter[str]
    worse: tuple[list[Example], list[Example]] | None = None

    @property
    def tenants(self) -> set[str]:
        """Tenants of live traces in the data, as `export` writes them into lines."""
        parts = (self.training, self.held_out, *(self.worse or ()))
        return {name for part in parts for each in part for name in each.tenants}

    @property
    def digest(self) -> str:
        """A text that changes if any part of the data does."""
        parts = (self.training, self.held_out, *(self.worse or ()))
        return digest(
            [[replace(each, source="", provenance={}) for each in part] for part in parts]
        )  # without source and provenance: the same data in another folder has the same digest


def read(config: SftConfig) -> Data:
    """Read the data to learn and the held-out data.

    Raises:
        LightningError: a file or a store is missing or wrong, or contains nothing.
    """
    if not config.data:
        raise ConfigError("give the training data: files of conversations, or stores.")
    left_out: Counter[str] = Counter()
    if config.loss == "dpo":
        return _read_pairs(config, left_out)
    found: list[Example] = []
    for name in config.data:
        if is_store(name):
            found += read_lines_of_store(_from_store(name, config, left_out), name)
        else:
            found += _permitted_lines(read_file(Path(name), left_out), name, config, left_out)
    looked_at = read_file(config.val, left_out) if config.val is not None else []
    looked_at = _permitted_lines(looked_at, f"--val {config.val}", config, left_out)
    check_agents([*found, *looked_at], config.agents)
    if config.val is not None:
        return Data(training=found, held_out=looked_at, left_out=left_out)
    training, looked_at = split_held_out(found, config.held_out, left_out)
    return Data(training=training or found, held_out=looked_at if training else [], left_out=left_out)


def _read_pairs(config: SftConfig, left_out: Counter[str]) -> Data:
    found: list[PreferencePair] = []
    for name in config.data:
        if is_store(name):
            lines = _from_store(name, config, left_out)
            found += [read_pair(line, f"{name}, pair {number}") for number, line in enumerate(lines, 1)]
        else:
            found += _permitted_lines(read_pairs(Path(name)), name, config, left_out)
    of_file = read_pairs(config.val) if config.val is not None else []
    of_file = _permitted_lines(of_file, f"--val {config.val}", config, left_out)
    check_agents([pair.chosen for pair in (*found, *of_file)], config.agents)
    found = _different(found, left_out, ", ".join(config.data))
    if config.val is not None:
        training, looked_at = found, _different(of_file, left_out, f"--val {config.val}")
    else:
        worse = {id(pair.chosen): pair for pair in found}
        parts = split_held_out([pair.chosen for pair in found], config.held_out, left_out)
        training, looked_at = ([worse[id(each)] for each in part] for part in parts)
    training, looked_at = (training, looked_at) if training else (found, [])
    return Data(
        training=[pair.chosen for pair in training],
        held_out=[pair.chosen for pair in looked_at],
        left_out=left_out,
        worse=([pair.rejected for pair in training], [pair.rejected for pair in looked_at]),
    )


def _permitted_lines(lines: Sequence[_Line], place: str, config: SftConfig, left_out: Counter[str]) -> list[_Line]:
    """Leave out the lines of a file that `export` wrote from live traces of other tenants, and count them.

    Raises:
        DataError: no line is left.
    """
    permitted: list[_Line] = []
    reasons: Counter[str] = Counter()
    for line in lines:
        sides = (line.chosen, line.rejected) if isinstance(line, PreferencePair) else (line,)
        against = (config.permits.reason_against_tenants(side.tenants) for side in sides if side.needs_permit)
        if reason := next(filter(None, against), None):
            reasons[reason] += 1
        else:
            permitted.append(line)
    if lines and not permitted:
        raise DataError(f"{place}: no line may be learned from.\n{_list_reasons(reasons)}")
    left_out += reasons
    return permitted


def _check_of_stores(config: SftConfig) -> None:
    """Refuse options that select traces of stores, if there is no store.

    Raises:
        ConfigError: names them.
    """
    given = [name for name in ("best", "origin") if getattr(config, name) is not None]
    if given and config.data and not any(map(is_store, config.data)):
        raise ConfigError(
            f"{', '.join(given)}: these select from stores, and {', '.join(config.data)} is not a store. Leave it out,"
            " or give it to `lightning-rl export`, which writes such files."
        )


def _list_reasons(reasons: Counter[str]) -> str:
    return "\n".join(f"  {count}: {reason}" for reason, count in reasons.most_common())


def _different(pairs: Sequence[PreferencePair], left_out: Counter[str], place: str) -> list[PreferencePair]:
    """Leave out pairs whose answers are the same, and count them.

    Args:
        pairs: that were read.
        left_out: counts them.
        place: source of the pairs, for the error.

    Raises:
        DataError: no other pair is left.
    """
    found = [pair for pair in pairs if not pair.same]
    if not found:
        raise DataError(
            f"{place}: chosen and rejected are the same in all {len(pairs)} pairs, so neither is the better one. Give"
            " pairs whose answers differ."
        )
    if len(pairs) > len(found):
        left_out[UnlearnedReason.SAME_ANSWERS] += len(pairs) - len(found)
    return found


def _from_store(name: str, config: SftConfig, left_out: Counter[str]) -> list[Line]:
    path = Path(name.removeprefix("sqlite:///"))
    if not name.startswith(("http://", "https://", "postgresql")) and not path.is_file():
        raise ConfigError(f"there is no store {path}. Give a file of conversations, or the store of a run.")
    wanted = ExportSelection(
        format="dpo" if config.loss == "dpo" else "sft", agents=config.agents, min_reward=config.min_reward,
        best=config.best, origin=config.origin, permits=config.permits,
    )  # fmt: skip
    with closing(open_store(name)) as store, open_selection(store, wanted) as chosen:
        left_out += chosen.left_out
        found = list(chosen.training())
    if not found:
        what = "pair" if config.loss == "dpo" else "conversation"
        raise DataError(f"the store {name} has no {what} to learn from.\n{_list_reasons(left_out)}".rstrip())
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Input of the loop."""

    rows: list[Row]
    held_out: list[Row]
    recorded: int
    left_out: Counter[str]
    update: Callable[[list[Row]], dict[str, float]] | None = None
    loss: Callable[[Sequence[Row]], float] | None = None


def _task(config: SftConfig, learner: Learner, data: Data) -> _Task:
    rows, looked_at = _rows(config, learner, data.training), _held_out_rows(config, learner, data.held_out)
    if data.worse is None:
        left_out = data.left_out + rows.left_out + looked_at.left_out
        recorded = rows.recorded + looked_at.recorded
        return _Task(rows=rows.rows, held_out=looked_at.rows, recorded=recorded, left_out=left_out)
    anything = config.model_copy(update={"min_reward": None})  # for the worse answers: any reward
    pairs, left_out = match_pairs(rows, _rows(anything, learner, data.worse[0]))
    held: list[tuple[Row, Row]] = []
    if looked_at.rows:
        try:
            held, more = match_pairs(looked_at, _held_out_rows(anything, learner, data.worse[1]))
        except DataError:
            if config.val is not None:
                raise
            held, more = [], Counter({UnlearnedReason.ONE_LEFT_OUT: len(looked_at.rows)})  # then nothing is evaluated
        left_out += more
        held = [(_rename_row(chosen), _rename_row(rejected)) for chosen, rejected in held]
    dpo = Dpo(learner, [*pairs, *held], config.beta or BETA)
    return _Task(
        rows=[chosen for chosen, _ in pairs], held_out=[chosen for chosen, _ in held], update=dpo.update, loss=dpo.loss,
        recorded=rows.recorded + looked_at.recorded, left_out=data.left_out + left_out,
    )  # fmt: skip


def _rows(config: SftConfig, learner: Learner, data: Sequence[Example]) -> RowsToLearn:
    limit = learner.engine.max_model_len
    return make_rows(
        data,
        Renderer.of(learner),
        agents=config.agents,
        policies=parse(config.policies),
        max_length=min(config.max_length or limit, limit),
        min_reward=config.min_reward,
    )


def _held_out_rows(config: SftConfig, learner: Learner, data: Sequence[Example]) -> RowsToLearn:
    """Make the held-out rows. If all are left out, nothing is evaluated, unless a file was named for it."""
    try:
        return _rows(config, learner, data) if data else RowsToLearn(rows=[], left_out=Counter(), recorded=0)
    except DataError:
        if config.val is not None:
            raise
        return RowsToLearn(rows=[], left_out=Counter(), recorded=0)


def steps_of(config: SftConfig, rows: int) -> int:
    """Return the number of steps of all epochs."""
    return config.steps or steps_of_epochs(config.epochs or _EPOCHS, rows, config.batch_size)


def _rename_row(row: Row) -> Row:
    """Give a held-out row a name that no training row has."""
    return replace(row, attempt_id=f"held out {row.attempt_id}")


def _tell(progress: Progress, task: _Task, agents: tuple[str, ...] | None) -> None:
    tokens = sum(int(row.mask.sum()) for row in task.rows)
    progress.note(
        f"{len(task.rows)} rows to learn from ({tokens} tokens of answers), {len(task.held_out)} held out; "
        f"{task.recorded} with recorded tokens"
    )
    for reason, count in task.left_out.most_common():
        progress.note(f"{count} left out: {reason}")
    for name in unheard(agents or (), {row.agent for row in task.rows}):
        progress.note(f"nothing is learned for {name}: all of its answers are held out or left out")
