"""What must not reach a disk: fields by name, text by pattern, and the masking settings of OpenInference.

``password`` masks the value of every field and attribute of that name, at any depth of JSON, including JSON within
text. It may be a glob, such as ``*_token``. ``/[0-9]{16}/`` masks matches in any text, key and number. Names ignore
case.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema.calls import LEFT_OUT, Call
from lightning_spans.schema.json import dumps, read_json
from lightning_spans.schema.spans import CHAT, REQUEST, RESPONSE, TOOL_ARGUMENTS, TOOL_RESULT, TOOL_RETURNED, Json, Span
from lightning_spans.terms import TERMS

if TYPE_CHECKING:
    from openinference.instrumentation import TraceConfig

MASK: Final = "__REDACTED__"  # as OpenInference writes it
_DEEPEST: Final = 60  # levels of JSON that are searched; deeper values are masked completely

_OURS: Final = (TERMS, "conversation", "seeds")  # in a call's sampling: what a record is found and used by

_PREFIX: Final = "OPENINFERENCE_HIDE_"
HIDES: Final = (
    "INPUTS", "OUTPUTS", "INPUT_MESSAGES", "OUTPUT_MESSAGES", "INPUT_IMAGES", "INPUT_TEXT", "OUTPUT_TEXT", "PROMPTS",
    "CHOICES", "LLM_INVOCATION_PARAMETERS", "LLM_TOOLS", "EMBEDDING_VECTORS", "EMBEDDINGS_VECTORS", "EMBEDDINGS_TEXT",
    "RETRIEVAL_DOCUMENTS",
)  # fmt: skip
_IMAGE_LENGTH: Final = "OPENINFERENCE_BASE64_IMAGE_MAX_LENGTH"

# Keys of a request's and a response's JSON by their content, for every API that is recorded.
_ASKED: Final = ("messages", "input", "prompt", "system", "instructions", "contents", "system_instruction", "suffix")
_TOOLS: Final = ("tools", "functions", "tool_choice", "function_call")
_ANSWERED: Final = ("choices", "output", "content", "output_text", "reasoning", "candidates", "message", "text")
_TEXTS: Final = ("content", "text", "arguments", "input_text", "output_text", "refusal", "reasoning_content", "input")
_IMAGES: Final = ("image_url", "input_image", "image")
# Prefixes of other instrumentors' attributes that OpenInference's own masking does not know.
_OTHERS: Final[Mapping[str, tuple[str, ...]]] = {
    "INPUTS": ("llm.prompt_template", "gen_ai.input.", "gen_ai.prompt", "gen_ai.system_instr",
               "gen_ai.tool.definitions"),
    "OUTPUTS": ("gen_ai.output.", "gen_ai.completion"),
    "INPUT_MESSAGES": ("gen_ai.input.", "gen_ai.system_instr"),
    "OUTPUT_MESSAGES": ("gen_ai.output.",),
    "INPUT_TEXT": ("gen_ai.input.", "gen_ai.system_instr"),
    "OUTPUT_TEXT": ("gen_ai.output.",),
    "PROMPTS": ("gen_ai.prompt",),
    "CHOICES": ("gen_ai.completion",),
    "LLM_INVOCATION_PARAMETERS": ("gen_ai.request.temperature", "gen_ai.request.top_", "gen_ai.request.max_tokens",
                                  "gen_ai.request.choice"),
    "LLM_TOOLS": ("gen_ai.tool.definitions",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Redaction:
    """Rules that are applied to a span, or to the record of a call, before any of it is kept.

    Attributes:
        names: globs of fields, in lower case.
        patterns: masked within text.
        hides: OpenInference's settings that are on, such as ``INPUTS``.
        image_length: longest base64 image kept; None: any.
    """

    names: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()
    hides: frozenset[str] = frozenset()
    image_length: int | None = None
    _others: tuple[str, ...] = field(default=(), repr=False)
    _theirs: TraceConfig | None = field(default=None, repr=False)  # OpenInference's settings, for its own attributes

    def __bool__(self) -> bool:
        return bool(self.names or self.patterns or self.hides or self.image_length is not None)

    def __call__(self, span: Span) -> Span:
        """Return the span masked; the same object if nothing was."""
        attributes = {key: self._attribute(key, value) for key, value in span.attributes.items()}
        clean = replace(
            span,
            name=self._text(span.name),
            status_message=self._error(span),
            attributes=attributes,
        )
        return span if clean == span else clean

    def mask_call(self, call: Call) -> Call:
        """Return the record of a call masked, without its tokens; the same object if nothing was.

        The tokens are the text once more, and a record without them is never trained on.
        """
        if not self:
            return call
        clean = self._call(call)
        # Without rules it is only brought into the same form: tuples become lists.
        if clean == NOTHING._call(call):
            return call
        choices = tuple(replace(choice, token_ids=None, logprobs=None) for choice in clean.choices)
        return replace(clean, prompt_token_ids=None, choices=choices)

    def _call(self, call: Call) -> Call:
        request = self._request(dict(call.request))
        kept = {key: value for key, value in call.sampling.items() if key in request or key not in call.request}
        if isinstance(left_out := kept.get(LEFT_OUT), Mapping):
            kept[LEFT_OUT] = self._request(dict(left_out))
        ours = {key: value for key, value in kept.items() if key in _OURS}
        return replace(
            call,
            request=self._any(request, 0),
            choices=tuple(replace(choice, message=self._message(choice.message)) for choice in call.choices),
            sampling={**self._any(kept, 0), **ours},
            error=None if call.error is None else self._string(call.error, 0),
        )

    def _message(self, message: Mapping[str, Json]) -> Mapping[str, Json]:
        hidden = self._response({"choices": dict(message)})["choices"]
        if not isinstance(hidden, dict):
            hidden = {**({"role": message["role"]} if "role" in message else {}), "content": hidden}
        clean: dict[str, Json] = self._any(hidden, 0)
        return clean

    def _error(self, span: Span) -> str:
        """Mask an error: often it contains a tool's output, also in the spans of surrounding agents and workflows."""
        if span.status_message and span.operation != CHAT and "OUTPUTS" in self.hides:
            return MASK
        return self._string(span.status_message, 0)

    def _attribute(self, key: str, value: Json) -> Json:
        if self._is_named(key) or key.startswith(self._others):
            return MASK
        if key == REQUEST:
            return self._body(value, self._request)
        if key == RESPONSE:
            return self._body(value, self._response)
        if (key == TOOL_ARGUMENTS and "INPUTS" in self.hides) or (
            key in {TOOL_RESULT, TOOL_RETURNED} and "OUTPUTS" in self.hides
        ):
            return MASK
        if self._theirs is not None and self._theirs.mask(key, value) != value:  # leaves out, or masks
            return MASK
        return self._any(value, 0)

    def _body(self, value: Json, hide: Callable[[dict[str, Any]], dict[str, Any]]) -> Json:
        """Mask the JSON text of a request or response. Unreadable text is masked completely if it would be hidden."""
        try:
            body = read_json(value) if isinstance(value, str) else value
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return MASK if self.hides else self._any(value, 0)
        return dumps(self._any(hide(body), 0)).decode()

    def _request(self, body: dict[str, Any]) -> dict[str, Any]:
        hides, out = self.hides, dict(body)
        for key, value in body.items():
            asked, tools = key in _ASKED, key in _TOOLS
            hidden = hides & {"INPUTS", "INPUT_MESSAGES"} or (key == "prompt" and "PROMPTS" in hides)
            if (asked and hidden) or (tools and hides & {"INPUTS", "LLM_TOOLS"}):
                out[key] = MASK
            elif not (asked or tools or key == "model") and "LLM_INVOCATION_PARAMETERS" in hides:
                del out[key]
            elif asked and hides & {"INPUT_TEXT", "INPUT_IMAGES", "EMBEDDINGS_TEXT"}:
                out[key] = self._parts(value, text=bool(hides & {"INPUT_TEXT", "EMBEDDINGS_TEXT"}))
        return out

    def _response(self, body: dict[str, Any]) -> dict[str, Any]:
        hides, out = self.hides, dict(body)
        for key, value in body.items():
            if key in _ANSWERED and (
                hides & {"OUTPUTS", "OUTPUT_MESSAGES"} or (key == "choices" and "CHOICES" in hides)
            ):
                out[key] = MASK
            elif key in _ANSWERED and "OUTPUT_TEXT" in hides:
                out[key] = self._parts(value, text=True)
            elif key == "data" and hides & {"EMBEDDING_VECTORS", "EMBEDDINGS_VECTORS", "OUTPUTS"}:
                out[key] = MASK
        return out

    def _parts(self, value: Json, *, text: bool, depth: int = 0) -> Json:
        """Mask the text or the images of messages, but not their roles."""
        if depth > _DEEPEST or (text and isinstance(value, str)):
            return MASK
        if isinstance(value, list):
            return [self._parts(item, text=text, depth=depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        if "INPUT_IMAGES" in self.hides and (value.get("type") in _IMAGES or any(key in value for key in _IMAGES)):
            return {**({"type": value["type"]} if "type" in value else {}), "image": MASK}
        out = dict(value)
        for key, inner in value.items():
            if isinstance(inner, (dict, list)) or (text and key in _TEXTS):
                out[key] = self._parts(inner, text=text, depth=depth + 1)
        return out

    def _any(self, value: Json, depth: int) -> Json:
        """Mask fields by name and text by pattern, at any depth."""
        if depth > _DEEPEST:
            return MASK
        if isinstance(value, str):
            return self._string(value, depth)
        if isinstance(value, Mapping):
            return {
                self._text(str(key)): MASK if self._is_named(key) else self._any(inner, depth + 1)
                for key, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._any(item, depth + 1) for item in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return MASK if any(pattern.search(str(value)) for pattern in self.patterns) else value
        return value

    def _string(self, text: str, depth: int) -> str:
        if self.image_length is not None and len(text) > self.image_length and text.startswith("data:image/"):
            return MASK
        if (self.names or self.patterns) and text.lstrip()[:1] in {"{", "["}:
            try:
                inner = read_json(text)
            except ValueError:
                return MASK if any(map(self._is_named, _quoted_keys(text))) else self._text(text)
            if isinstance(inner, (dict, list)):
                clean = self._any(inner, depth + 1)
                return self._text(text if clean == inner else dumps(clean).decode())
        return self._text(text)

    def _text(self, text: str) -> str:
        for pattern in self.patterns:
            text = pattern.sub(MASK, text)
        return text

    def _is_named(self, key: str) -> bool:
        lowered = str(key).lower()
        return any(fnmatchcase(lowered, name) for name in self.names)


def _quoted_keys(text: str) -> Iterator[str]:
    """Yield the names of fields in truncated JSON and in Python's `repr`, in linear time."""
    for end in re.finditer(r"""["']\s*:""", text):
        begin = text.rfind(end[0][0], 0, end.start())
        if begin >= 0:
            yield text[begin + 1 : end.start()].rstrip("\\")  # in JSON within JSON, the quotes are escaped


NOTHING: Final = Redaction()


def read_rules(rules: Sequence[str], environ: Mapping[str, str]) -> Redaction:
    """Create a redaction from rules and from OpenInference's variables.

    Args:
        rules: names, globs, or patterns between slashes.
        environ: contains ``OPENINFERENCE_HIDE_*`` and ``OPENINFERENCE_BASE64_IMAGE_MAX_LENGTH``.

    Raises:
        ConfigError: a pattern cannot be parsed, or a variable is invalid.
    """
    names, patterns = [], []
    for rule in (text.strip() for text in rules):
        if len(rule) > 1 and rule.startswith("/") and rule.endswith("/"):
            try:
                patterns.append(re.compile(rule[1:-1]))
            except re.error as error:
                raise ConfigError(f"redaction rule {rule}: {error}. Give a regular expression of Python's.") from None
        elif rule:
            names.append(rule.lower())
    hides = frozenset(name for name in HIDES if _switch(f"{_PREFIX}{name}", environ))
    others = tuple(start for name in sorted(hides) for start in _OTHERS.get(name, ()))
    return Redaction(tuple(names), tuple(patterns), hides, _length(environ), others, _config(hides) if hides else None)


def _config(hides: Collection[str]) -> TraceConfig:
    from openinference.instrumentation import TraceConfig

    # All are given, because it would read missing ones from the process's own environment.
    switches: dict[str, Any] = {f"hide_{name.lower()}": name in hides for name in HIDES}
    return TraceConfig(**switches, base64_image_max_length=sys.maxsize)  # images are searched for in every text, above


def _switch(name: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name, "").strip().lower()
    if value not in {"", "0", "1", "true", "false"}:
        raise ConfigError(f"{name}={value!r}: set it to true or false.")
    return value in {"1", "true"}


def _length(environ: Mapping[str, str]) -> int | None:
    value = environ.get(_IMAGE_LENGTH, "").strip()
    if value and not value.isdigit():
        raise ConfigError(f"{_IMAGE_LENGTH}={value!r}: give a number of characters.")
    return int(value) if value else None
