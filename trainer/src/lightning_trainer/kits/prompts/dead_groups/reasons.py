"""Why an answer under an instruction is not learned as an answer to the agent's own prompt."""

from __future__ import annotations

from lightning_trainer.reasons.reason import Reason


class UndistilledReason(Reason):
    """Why a call of such a rollout is left out, in addition to `UntrainedReason`."""

    UNSOLVED = "under an instruction, which did not solve the task"
    UNINSTRUCTED = "of a rollout in which another agent had an instruction"
    NOT_REPRODUCED = "the tokens of its prompt can't be reproduced from its request"
    NO_OWN_PROMPT = "the agent's own prompt can't be read from its request"
    TOO_LONG = "longer than max_model_len with the agent's own prompt"
