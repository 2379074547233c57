"""Proposals of instructions: from failed rollouts, within a budget, and none paid for twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_trainer.kits.prompts.journal import add_line, digest_of, read_lines
from lightning_trainer.kits.prompts.reflection import Reflection

FILE: Final = "instructions.jsonl"  # in the run's folder
EXAMPLES: Final = 3  # maximum dead tasks that a proposal is made from


class PaidProposals:
    """All proposals that a run has paid for, including those of steps that were repeated after a stop.

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
        """Return the saved result for the same prompt; None if there is none: `PaidCalls.next`."""
        name = digest_of([kind, asked])
        return next((line["came_to"] for line in self._lines if line["asked"] == name), None)

    def add(self, kind: str, asked: object, came_to: dict[str, Any]) -> None:
        """Save a proposal: `PaidCalls.add`."""
        line = {"asked": digest_of([kind, asked]), "came_to": came_to}
        add_line(self._path, line)
        self._lines.append(line)


def propose(reflection: Reflection, own: str, examples: Sequence[Mapping[str, Any]], failed: Sequence[str]) -> str:
    """Return an instruction for an agent, proposed with GEPA's prompt; empty if the answer contains none.

    Args:
        reflection: the model that proposes.
        own: the agent's prompt.
        examples: the agent's inputs and outputs in failed rollouts, with feedback.
        failed: instructions under which these tasks were not solved either.

    Raises:
        LightningError: the model cannot be reached, or returns no text.
    """
    from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

    tried = {"Instructions that did not help": list(failed)} if failed else {}
    given = {"current_instruction_doc": own, "dataset_with_feedback": [{**example, **tried} for example in examples]}
    text: str = Signature.output_extractor(reflection(Signature.prompt_renderer(given)))["new_instruction"]
    return text.strip()
