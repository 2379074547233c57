"""The index behind a URL: `python service.py 8900`, or `python service.py 8900 0.0.0.0` for workers on other machines.

It needs nothing but Python.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from index import Index


def make_server(port: int, host: str) -> ThreadingHTTPServer:
    """Load the index once, and answer GET /search?q=... from it."""
    index = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            question = parse_qs(urlsplit(self.path).query).get("q", [""])[0]
            body = json.dumps({"text": index.search(question)}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing for each request."""

    return ThreadingHTTPServer((host, port), Handler)


if __name__ == "__main__":
    host = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    server = make_server(int(sys.argv[1]), host)
    print(f"INDEX_URL=http://{host}:{server.server_address[1]}", flush=True)
    server.serve_forever()
