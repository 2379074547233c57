"""Code that an agent has run by an executor: a tool call that no model asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from autogen_core.code_executor import CodeExecutor, CodeResult

from lightning_autogen import FRAMEWORK
from lightning_openai.json_text import to_json
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import place_of_call
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span
from lightning_spans.record.replay import Given, acalled
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

TOOL: Final = "code_executor"


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every executor of code, until what is yielded is called."""
    code = AutogenCode(recorder, FRAMEWORK)
    yield code.stop
    yield replace_in_subclasses(CodeExecutor, "execute_code_blocks", code.wrap_execute)


class AutogenCode(Tracker):
    """Makes the spans of code that is run outside of a tool: inside of one, that tool's span is the call."""

    def wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Blocks of code are run, unless the record of a replay says what came of it.

        An exit code other than 0 is an error.
        """

        async def execute_code_blocks(executor: Any, code_blocks: Any, *args: Any, **kwargs: Any) -> Any:
            around = current_span()
            if not self.live or (around is not None and around.operation == names.EXECUTE_TOOL):
                return await original(executor, code_blocks, *args, **kwargs)
            span = None
            with self.guard():
                span = self.begin_tool(TOOL, None, _arguments(code_blocks), place_of_call())
            with self.inside(span):
                result = await acalled(lambda: original(executor, code_blocks, *args, **kwargs), _result)
                with self.guard(span):
                    failed = result.output or f"exit code {result.exit_code}" if result.exit_code else None
                    self.end(span, error=failed, attributes={names.TOOL_RESULT: result.output})
                return result

        return execute_code_blocks


def _result(given: Given) -> Any:
    """Make of the record what an executor gives."""
    if given.returned is not None:
        return given.outcome()
    return CodeResult(exit_code=int(given.failed), output=given.result or given.error)


def _arguments(blocks: Sequence[Any]) -> str:
    return to_json({"code_blocks": [{"language": block.language, "code": block.code} for block in blocks]})
