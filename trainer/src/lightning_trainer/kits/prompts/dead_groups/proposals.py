"""Proposals of instructions: from rollouts that failed, within a budget, and none paid for twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_trainer.kits.prompts.journal import add_line, digest_of, read_lines
from lightning_trainer.kits.prompts.reflection import Reflection

FILE: Final = "instructions.jsonl"  # in the run's folder
EXAMPLES: Final = 3  # dead tasks that a proposal is made from


class PaidProposals:
    """Every proposal that a run has paid for, steps that were taken again after a stop among them.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = read_lines(path)

    @property
    def count(self) -> int:
        """Number of proposals."""
        return len(self._lines)

    @property
    def tokens(self) -> int:
        """Tokens of their prompts and answers, as the server counted them."""
        return sum(line["came_to"]["tokens"] for line in self._lines)

    def next(self, kind: str, asked: object) -> dict[str, Any] | None:
        """Return what the same prompt came to; None where it was not asked: `PaidCalls.next`."""
        name = digest_of([kind, asked])
        return next((line["came_to"] for line in self._lines if line["asked"] == name), None)

    def add(self, kind: str, asked: object, came_to: dict[str, Any]) -> None:
        """Keep a proposal: `PaidCalls.add`."""
        line = {"asked": digest_of([kind, asked]), "came_to": came_to}
        add_line(self._path, line)
        self._lines.append(line)


def propose(reflection: Reflection, own: str, examples: Sequence[Mapping[str, Any]], failed: Sequence[str]) -> str:
    """Return an instruction for an agent, as GEPA's prompt asks for it; empty where the answer has none.

    Args:
        reflection: the model that proposes.
        own: the agent's prompt.
        examples: what the agent was asked in rollouts that failed, what it said, and how that went.
        failed: instructions under which these tasks were not solved either.

    Raises:
        LightningError: the model can't be reached, or answers no text.
    """
    from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

    tried = {"Instructions that did not help": list(failed)} if failed else {}
    given = {"current_instruction_doc": own, "dataset_with_feedback": [{**example, **tried} for example in examples]}
    text: str = Signature.output_extractor(reflection(Signature.prompt_renderer(given)))["new_instruction"]
    return text.strip()
