"""Tool spans for code that a code executor runs: a tool call that no model asked for by name."""

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
from lightning_spans.record.replay import RecordedOutcome, arun_or_replay
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

TOOL: Final = "code_executor"


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch AutoGen to record every code executor; what is yielded removes each patch."""
    code = AutogenCode(recorder, FRAMEWORK)
    yield code.stop
    yield replace_in_subclasses(CodeExecutor, "execute_code_blocks", code.wrap_execute)


class AutogenCode(Tracker):
    """Creates spans for code that runs outside a tool. Within a tool, the tool's span covers it."""

    def wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the execution of code blocks. A replay returns the recorded result.

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
                result = await arun_or_replay(lambda: original(executor, code_blocks, *args, **kwargs), _result)
                with self.guard(span):
                    failed = result.output or f"exit code {result.exit_code}" if result.exit_code else None
                    self.end(span, error=failed, attributes={names.TOOL_RESULT: result.output})
                return result

        return execute_code_blocks


def _result(given: RecordedOutcome) -> Any:
    """Convert a recorded result to the executor's type."""
    if given.returned is not None:
        return given.outcome()
    return CodeResult(exit_code=int(given.failed), output=given.result or given.error)


def _arguments(blocks: Sequence[Any]) -> str:
    return to_json({"code_blocks": [{"language": block.language, "code": block.code} for block in blocks]})
