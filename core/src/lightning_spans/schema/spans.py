"""The span: one timed operation of an agent. This module defines the schema.

Names follow the OpenTelemetry GenAI conventions (July 2026); what those lack is under ``lightning.*``. The strings are
copied, not imported, because the Python package marks every ``gen_ai.*`` constant as moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

SCHEMA_VERSION: Final = 1

Status: TypeAlias = Literal["ok", "error", "unset"]
Json: TypeAlias = Any  # what json.loads can give: str, int, float, bool, None, list, dict

CHAT: Final = "chat"  # any call that a language model answers, including a text completion: `ENDPOINT` says which
EXECUTE_TOOL: Final = "execute_tool"
INVOKE_AGENT: Final = "invoke_agent"
INVOKE_WORKFLOW: Final = "invoke_workflow"  # what surrounds several agents: a team, a graph, a run with handoffs

TRAINING: Final = "training"  # origin of what a runner or a plain script records
LIVE: Final = "live"  # origin of what an agent in production records
SHADOW: Final = "shadow"  # origin of a candidate's answers to copies of live calls: no trace has them

OPERATION: Final = "gen_ai.operation.name"
AGENT_NAME: Final = "gen_ai.agent.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"  # JSON text
TOOL_RESULT: Final = "gen_ai.tool.call.result"  # text, or JSON if the tool returned data
# what its own code returned, if that is not the text: `record.returned`
TOOL_RETURNED: Final = "lightning.tool.returned"
TOOL_PURE: Final = "lightning.tool.pure"  # marked: it depends only on its arguments and changes nothing
TOOL_SIDE_EFFECTS: Final = "lightning.tool.side_effects"  # marked: it must never run twice
REPLAYED: Final = "lightning.replayed"  # of a tool in a replay: whether its recorded result was returned, or it ran
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"

FRAMEWORK: Final = "lightning.framework"
REROUTABLE: Final = "lightning.reroutable"  # a framework reports the call, and it would go to a policy of its agent
UNASKABLE: Final = "lightning.unaskable"  # fields of a request in a vendor's format that no policy supports
ROLLOUT_ID: Final = "lightning.rollout.id"
ATTEMPT_ID: Final = "lightning.attempt.id"
ORIGIN: Final = "lightning.origin"  # left out if it is "training"
SCHEMA: Final = "lightning.schema.version"
REQUEST: Final = "lightning.request"  # JSON text of the request body as sent
RESPONSE: Final = "lightning.response"  # JSON text of the response body; for a stream, of the assembled message
ENDPOINT: Final = "lightning.endpoint"  # "/chat/completions", "/completions" or "/responses"
STREAMED: Final = "lightning.streamed"
REROUTED: Final = "lightning.rerouted"
ABANDONED: Final = "lightning.abandoned"  # the agent stopped reading a stream before its end
HANDOFF: Final = "lightning.handoff"  # of a handoff's tool call: the name of the agent that continues
# the agent's position in nested graphs or teams, outermost first, separated by "/"
AGENT_PATH: Final = "lightning.agent.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One timed operation in an attempt.

    Attributes:
        operation: ``chat``, ``execute_tool``, ``invoke_agent``, or another OTel GenAI operation.
        name: shown by viewers: the tool, the agent, the model.
        trace_id: 32 hex digits.
        span_id: 16 hex digits, unique in its trace.
        parent_id: the parent's `span_id`; None for a root.
        start_ns: Unix time in nanoseconds.
        end_ns: Unix time in nanoseconds, never before `start_ns`.
        status: ``ok``, ``error``, or ``unset`` if the source did not say.
        status_message: the error's text; empty if there is none.
        agent: the agent at work; None if nothing named one.
        rollout_id: the rollout; None for traces made outside a runner.
        attempt_id: the attempt; None for traces made outside a runner.
        origin: its purpose: ``training``, ``live``, or a label of the user's own.
        attributes: JSON-like values by attribute name. Values are str, bool, int, float or lists of those.
    """

    operation: str
    name: str
    trace_id: str
    span_id: str
    start_ns: int
    end_ns: int
    parent_id: str | None = None
    status: Status = "unset"
    status_message: str = ""
    agent: str | None = None
    rollout_id: str | None = None
    attempt_id: str | None = None
    origin: str = TRAINING
    attributes: Mapping[str, Json] = field(default_factory=dict)
