"""A scripted model server on loopback that remembers every request it received.

It serves ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/responses``, streamed or not, with tool calls, several
choices, errors, delays and cut connections, and returns token ids as vLLM does. It also accepts spans at
``/v1/traces``, so that it can stand in for the training side, and answers a replay's requests at ``/v1/replay/tool`` if
it is given `tools`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, TypeAlias

from lightning_conformance.plugins.script import Json, Reply, Script, answer, follow, pieces
from lightning_spans.record.delivery import otlp_reader
from lightning_spans.schema.spans import Span

Tools: TypeAlias = Callable[[dict[str, Json]], tuple[int, Json]]
_MODELS: Final = ("/chat/completions", "/completions", "/responses")
_GAP_S: Final = 0.002  # between the events of a stream, so that they arrive one by one


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request that the server received, and its answer.

    Attributes:
        path: the whole path with its query.
        headers: names in lower case.
        body: the parsed body; None for traces.
        raw: the body as received.
        status: the HTTP status of the answer.
        answer: the whole answer; for a stream, the one that it adds up to. None for traces.
    """

    path: str
    headers: dict[str, str]
    body: dict[str, Json] | None
    raw: bytes
    status: int
    answer: dict[str, Json] | None


class ScriptedServer:
    """The server; use it in a ``with`` block, or call `close()`.

    Args:
        script: returns the reply to a request; by default the request itself directs it, see `script.follow`.
        tools: answers a replay's tool requests, with an HTTP status and a body; None: there is no such path.
    """

    def __init__(self, script: Script = follow, *, tools: Tools | None = None) -> None:
        self._script = script
        self.tools = tools
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._requests: list[ReceivedRequest] = []
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = _Http(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def base(self) -> str:
        """The address without ``/v1``, as in an attempt's endpoint."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def url(self) -> str:
        """The address for a client's `base_url`."""
        return f"{self.base}/v1"

    def url_of(self, mark: str) -> str:
        """Return an address that puts a mark in the path of its requests: ``/MARK/v1/...``."""
        return f"{self.base}/{mark}/v1"

    @property
    def requests(self) -> list[ReceivedRequest]:
        """The model calls so far, in order of arrival."""
        with self._lock:
            return [request for request in self._requests if request.body is not None]

    @property
    def traces(self) -> list[ReceivedRequest]:
        """The deliveries of spans so far."""
        with self._lock:
            return [request for request in self._requests if request.body is None]

    @property
    def spans(self) -> list[Span]:
        """The spans so far, each once, as in a store: a delivery that is not confirmed in time is repeated."""
        found = {span.span_id: span for delivery in self.traces for span in otlp_reader.decode(delivery.raw)}
        return list(found.values())

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def decide(self, body: dict[str, Json]) -> tuple[Reply, int]:
        """Call the script; also return how many times the same body was seen before."""
        key = json.dumps(body, sort_keys=True)
        with self._lock:
            seen = self._seen[key]
            self._seen[key] += 1
            return self._script(body, seen), seen

    def keep(self, request: ReceivedRequest) -> None:
        """Remember a request."""
        with self._lock:
            self._requests.append(request)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect: some of them do so on purpose."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    owner: ScriptedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the base class has
        """Log nothing; the requests are kept instead."""

    def do_GET(self) -> None:
        """Answer ``/v1/models``, which some clients request."""
        self._send(200, {"object": "list", "data": [{"id": "test-model", "object": "model"}]})

    def do_POST(self) -> None:
        """Answer a model call or a replay's tool request, or accept spans."""
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        endpoint = next((known for known in _MODELS if path.endswith(known)), None)
        if path.endswith("/v1/traces"):
            self._keep(None, raw, 200, None)
            self._send(200, {})
        elif path.endswith("/v1/replay/tool") and self.owner.tools is not None:
            known = self.headers.get("authorization", "").startswith("Bearer ")
            self._send(*(self.owner.tools(json.loads(raw)) if known else (401, {"error": {"message": "no key"}})))
        elif endpoint is None:
            self._send(404, {"error": {"message": f"no such path: {self.path}", "type": "not_found", "code": None}})
        else:
            self._call(endpoint, raw)

    def _call(self, endpoint: str, raw: bytes) -> None:
        body = json.loads(raw)
        reply, seen = self.owner.decide(body)
        failed = reply.status >= 400
        error = {"error": {"message": reply.text, "type": "scripted_error", "code": str(reply.status)}}
        whole = error if failed else answer(endpoint, body, reply, seen)
        self._keep(body, raw, reply.status, whole)  # before waiting: the client may leave meanwhile
        if reply.delay_s:
            time.sleep(reply.delay_s)
        if failed:
            self._send(reply.status, error, {"retry-after-ms": "1"})
        elif body.get("stream"):
            self._stream(endpoint, body, whole, cut=reply.cut)
        else:
            self._send(200, whole, cut=reply.cut)

    def _keep(self, body: dict[str, Json] | None, raw: bytes, status: int, sent: dict[str, Json] | None) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.owner.keep(ReceivedRequest(self.path, headers, body, raw, status, sent))

    def _send(self, status: int, body: Json, headers: dict[str, str] | None = None, *, cut: bool = False) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut

    def _stream(self, endpoint: str, body: dict[str, Json], whole: dict[str, Json], *, cut: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        events = list(pieces(endpoint, body, whole))
        for event in events[: len(events) // 2] if cut else events:
            name = f"event: {event['type']}\n" if endpoint == "/responses" else ""
            self._chunk(f"{name}data: {json.dumps(event)}\n\n")
            time.sleep(_GAP_S)
        if cut:
            self.close_connection = True
            return
        if endpoint != "/responses":
            self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        content = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
