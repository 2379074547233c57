"""A server on loopback that answers as a test's own handler does, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Loopback:
    """Use it in a ``with`` block; `asked` grows with each request, as its handler fills it."""

    handler: type[LoopbackHandler]

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (self.handler,), {"owner": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class LoopbackHandler(BaseHTTPRequestHandler):
    """Reads JSON and sends text; the rest is a test's."""

    owner: Loopback
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def read(self) -> tuple[str, dict[str, Any]]:
        """The path without its query, and the body."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        return self.path.partition("?")[0], body

    def send(self, status: int, body: object) -> None:
        self.send_text(status, "application/json", json.dumps(body))

    def send_text(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing; the requests are kept instead."""
