"""How the trainer's process reaches the run's own server. Without verl."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from lightning_trainer.backends.verl.control import RunServerClient


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"cut": 3}).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("proxied", ["http_proxy", "ALL_PROXY"])
def test_a_proxy_for_the_internet_is_not_asked_for_the_server_on_this_machine(proxied, monkeypatch):
    monkeypatch.setenv(proxied, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert RunServerClient(f"http://127.0.0.1:{server.server_port}", "key").pause() == 3
