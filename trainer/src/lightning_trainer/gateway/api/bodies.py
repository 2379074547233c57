"""Request and response bodies of the API, generated from the store's protocol and the records' fields.

Only errors and bounds are defined here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, create_model

from lightning_spans.errors import LightningError
from lightning_spans.schema.json import field_types, from_json
from lightning_spans.store import Store
from lightning_spans.store.api import API
from lightning_spans.store.protocol import LARGEST_PAGE, LISTINGS, PAGE, Where

_LEASE = Annotated[float, Field(gt=0, le=86_400)]
_LARGEST: Final = 2**63 - 1  # largest whole number that a database holds
_BOUNDS: Final[Mapping[tuple[str, str], Any]] = {
    ("claim", "worker"): Annotated[str, Field(min_length=1, max_length=200)],
    ("claim", "limit"): Annotated[int, Field(ge=1, le=10_000)],
    ("claim", "lease_s"): _LEASE,
    ("heartbeat", "lease_s"): _LEASE,
}
AFTER: Final[Any] = Annotated[int, Field(ge=0, le=_LARGEST, description="where the page before ended: its `next`")]
LIMIT: Final[Any] = Annotated[int, Field(ge=1, le=LARGEST_PAGE, description="most records in the page")]


class Body(BaseModel):
    """The body of a request or response. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class Told(Body):
    """The state of a rollout, or why its end is rejected."""

    status: str | None = None
    code: str | None = None
    message: str | None = None


class ReplayBody(Body):
    """How many model calls and tools a replay answered from the record, and why it ended early."""

    replayed: int
    coupled: int
    sampled: int
    own: int
    tools_given: int
    tools_run: int
    ended: str | None


class ErrorDetail(Body):
    """An error, in OpenAI's format."""

    message: str
    type: str
    code: str | None
    param: str | None


class ErrorBody(Body):
    """The response to every request that fails."""

    error: ErrorDetail


def request_of(method: str) -> type[Body]:
    """Return the body of a request for a method of the store: its arguments except those in the path."""
    about, types = API[method], _types(method)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(getattr(Store, method)).parameters.items():
        if name == "self" or f"{{{name}}}" in about.path:
            continue
        kind = _BOUNDS.get((method, name)) or _body_type(types[name])
        fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    return _model(f"{_camel(method)}Request", fields, summary(method))


def answer_of(method: str) -> type[Body]:
    """Return the body of the response of a method of the store: its result under one key."""
    result = _types(method)["return"]
    if any(part is LightningError for part in _flat(result)):
        result = list[Told]
    return _model(f"{_camel(method)}Answer", {API[method].answer: (result, ...)})


@cache
def page_of(what: str) -> type[Body]:
    """Return the body of a response with a page of records."""
    kind: Any = LISTINGS[what].kind
    return _model(f"{_camel(what)}Page", {what: (list[kind], ...), "next": (int | None, None)})


def filters_of(what: str) -> dict[str, Any]:
    """Return the types of the filters that a list supports, by name."""
    return {name: _body_type(kind) for name, kind in field_types(Where).items() if name in LISTINGS[what].filters}


def query() -> type[Body]:
    """Return the body of a request for a page of a list, with lists of ids too long for a URL."""
    what: Any = Literal.__getitem__(tuple(LISTINGS))
    pages: dict[str, Any] = {
        "what": (what, ...),
        "after": (AFTER, 0),
        "limit": (LIMIT, PAGE),
        "newest_first": (bool, False),
    }
    return _model("Query", pages | {name: (_body_type(kind), None) for name, kind in field_types(Where).items()})


def _model(name: str, fields: Mapping[str, Any], doc: str | None = None) -> type[Body]:
    more: dict[str, Any] = dict(fields)
    return create_model(name, __base__=Body, __doc__=doc, **more)


def summary(method: str) -> str:
    """Return what a method of the store does, in the protocol's words."""
    return inspect.getdoc(getattr(Store, method)) or ""


@cache
def _types(method: str) -> dict[str, Any]:
    return get_type_hints(getattr(Store, method))


def _body_type(kind: Any) -> Any:
    """Return the type by which pydantic parses an argument. Records use their own codec, as everywhere."""
    if isinstance(kind, type) and is_dataclass(kind):
        reader: Callable[[Any], Any] = partial(from_json, kind)
        return Annotated[kind, PlainValidator(reader, json_schema_input_type=kind)]
    if get_origin(kind) is Sequence:
        (inner,) = get_args(kind)
        taken: Any = _body_type(inner)
        return list[taken]
    if type(None) in get_args(kind):
        inner = next(part for part in get_args(kind) if part is not type(None))
        return _body_type(inner) | None
    return kind


def _flat(kind: Any) -> list[Any]:
    inner = get_args(kind)
    return [kind] if not inner else [part for each in inner for part in _flat(each)]


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
