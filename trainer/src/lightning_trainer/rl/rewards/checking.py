"""JSON schemas and regular expressions of others, which are programs in disguise, checked in a separate process.

A schema may refer to itself endlessly, and a pattern may try endlessly many ways, so each check has a limit of
processor time and memory. The process fetches nothing. This file runs there as a script.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_trainer.bounded import BoundedProcess, TooLongError, answer_lines

CPU_S: Final = 2.0  # of one check
_MEMORY: Final = 2 << 30
_MOST_ENDED: Final = 3  # checks of one attempt that may take too long; after that no more are made
_CHECKER: Final = BoundedProcess(Path(__file__), str(CPU_S))


class Checks:
    """The checks of one attempt. After the third that takes too long, no more are made."""

    def __init__(self) -> None:
        self._ended = 0

    def fits(self, value: Any, schema: Any) -> bool:
        """Whether a value fits a JSON schema.

        Nothing fits an invalid schema, or one that cannot be resolved or takes too long.
        """
        return self._holds({"schema": schema, "value": value})

    def found(self, pattern: str, text: str) -> bool:
        """Whether a regular expression matches in a text. A search that takes too long matches nothing."""
        return self._holds({"pattern": pattern, "text": text})

    def _holds(self, question: dict[str, Any]) -> bool:
        if self._ended >= _MOST_ENDED:
            return False
        try:
            return _ask(question)
        except TooLongError:
            self._ended += 1
            return False
        except (RecursionError, ValueError):  # nested too deeply, or too long a number, to be written as JSON
            return False


def _ask(question: dict[str, Any]) -> bool:
    return _CHECKER.ask(json.dumps(question).encode()) == b"1"


def _main() -> None:
    answers = _answers_with()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # a library in Rust prints its panics
    answer_lines(lambda line: b"1" if any(answers(line)) else b"0", lambda _: float(sys.argv[1]), _MEMORY)


def _answers_with() -> Callable[[bytes], Iterator[bool]]:
    """Import the checking libraries first, which is not part of a check's time."""
    import re

    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    def answers(line: bytes) -> Iterator[bool]:
        # Their exceptions for an invalid schema must not end the rule; a panic in Rust is not an Exception.
        with suppress(BaseException):
            question = json.loads(line)
            if "pattern" in question:
                yield re.search(question["pattern"], question["text"]) is not None
                return
            schema = question["schema"]
            chosen = validator_for(schema, default=Draft202012Validator)
            chosen.check_schema(schema)
            yield chosen(schema, registry=REGISTRY).is_valid(question["value"])

    return answers


if __name__ == "__main__":
    _main()
