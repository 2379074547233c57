"""A proxy between a client and a server that fails as planned: refuses, loses answers, delays, cuts connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import httpx

from lightning_conformance.plugins.faults import Fault

PASSED_ON = ("content-type", "authorization", "content-encoding")


@contextmanager
def cutting(url: str, plan: Callable[[str, int], Fault | None], *, delay_s: float = 0.05) -> Iterator[str]:
    """Serve what the server at `url` serves, but for faults. Returns the proxy's URL.

    ``before``: the connection closes and nothing is passed on. ``after``: the request is passed on and its answer lost.
    ``cut``: half of the answer arrives. ``delay``: all of it, late.

    Args:
        url: of the server.
        plan: gives the fault of a request from its path and its number among those to that path; None: none.
        delay_s: how long a delay lasts.
    """
    counts: dict[str, int] = {}
    lock = Lock()
    client = httpx.Client(base_url=url, trust_env=False, timeout=30)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with lock:
                number = counts[self.path] = counts.get(self.path, -1) + 1
            fault = plan(self.path, number)
            if fault == "before":
                self._cut()
                return
            if fault == "delay":
                time.sleep(delay_s)
            headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
            answer = client.post(self.path, content=body, headers=headers)
            if fault == "after":
                self._cut()
                return
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content[: len(answer.content) // 2] if fault == "cut" else answer.content)
            if fault == "cut":
                self._cut()

        def _cut(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()
