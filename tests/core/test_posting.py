from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lightning_spans.record.delivery.http import Posts


class Server(ThreadingHTTPServer):
    """Counts its connections and keeps what it is sent; after `leaves` answers a connection is closed, unannounced.

    One that does not read bodies closes each connection over what comes.
    """

    daemon_threads = True

    def __init__(self, *, leaves: int = 0, status: int = 200, reads: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.leaves, self.status, self.reads = leaves, status, reads
        self.connections = 0
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1
        self.answered = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])) if self.server.reads else b""
        self.server.requests.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
        self.send_response(self.server.status)
        self.send_header("content-length", "2")
        self.send_header("X-Said", "this")
        self.end_headers()
        self.wfile.write(b"ok")
        self.answered += 1
        self.close_connection = self.answered == self.server.leaves or not self.server.reads

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve():
    servers = []

    def start(**options) -> Server:
        servers.append(Server(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def post():
    made = Posts(timeout_s=30.0)
    yield made
    made.close()


def test_requests_go_as_given_over_one_connection(serve, post):
    server = serve()
    for number in range(3):
        answer = post(f"{server.url}/v1/traces?a=b%20c", b"body %d" % number, {"x-given": str(number)})
        assert (answer.status, answer.headers.get("x-said"), answer.content) == (200, "this", b"ok")
    assert [(path, body, headers["x-given"]) for path, body, headers in server.requests] == [
        ("/v1/traces?a=b%20c", b"body %d" % number, str(number)) for number in range(3)
    ]
    assert server.connections == 1


def test_a_connection_that_the_server_closed_is_opened_again(serve, post):
    server = serve(leaves=1)
    for number in range(3):
        assert post(server.url, b"%d" % number, {}).status == 200
    assert [body for _, body, _ in server.requests] == [b"0", b"1", b"2"]
    assert server.connections == 3


def test_each_server_has_its_connection(serve, post):
    first, second = serve(), serve(status=503)
    assert [post(server.url, b"", {}).status for server in (first, second, first)] == [200, 503, 200]
    assert (first.connections, second.connections) == (1, 1)


def test_a_user_in_the_url_is_basic_authentication(serve, post):
    server = serve()
    post(server.url.replace("//", "//us%40er:pass@"), b"", {})
    assert server.requests[0][2]["authorization"] == "Basic dXNAZXI6cGFzcw=="


def test_a_server_that_is_not_there_raises(serve, post):
    server = serve()
    post(server.url, b"", {})
    server.shutdown()
    server.server_close()
    with pytest.raises(ConnectionRefusedError):
        Posts(timeout_s=30.0)(server.url, b"", {})
    with pytest.raises(http.client.InvalidURL, match="http or https"):
        post("ftp://127.0.0.1/", b"", {})


def test_closed_connections_are_opened_when_needed(serve, post):
    server = serve()
    post(server.url, b"1", {})
    post.close()
    post(server.url, b"2", {})
    assert server.connections == 2


def test_the_answer_of_a_server_that_refuses_a_body_before_it_has_come_is_heard(serve, post):
    server = serve(status=413, reads=False)
    for _ in range(2):
        assert post(server.url, bytes(64 << 20), {}).status == 413
