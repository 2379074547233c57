"""POST requests over connections that stay open.

Uses the standard library's client: httpx takes 0.4 ms of CPU per request in the agent's process, five times as much,
and a slow agent's model calls are sent one by one.
"""

from __future__ import annotations

import http.client
import os
import ssl
from base64 import b64encode
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from lightning_spans.store.tls import trusted_certificates

_Key: TypeAlias = tuple[int, str, str]


class HttpResponse(NamedTuple):
    """A server's response.

    Attributes:
        status: the HTTP status.
        headers: by lower-case name.
        content: the body.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes


class Posts:
    """Sends requests, one at a time. Uses no proxy and follows no redirect.

    Args:
        timeout_s: seconds to wait for a connection, and each time for more of the response.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: dict[_Key, http.client.HTTPConnection] = {}

    def __call__(self, url: str, content: bytes, headers: Mapping[str, str]) -> HttpResponse:
        """Send a request. If an open connection fails, send it again over a new one.

        Raises:
            OSError: the server cannot be reached, or does not respond in time.
            http.client.HTTPException: the response is not valid HTTP.
        """
        place = urlsplit(url)
        if place.username is not None:
            user = f"{unquote(place.username)}:{unquote(place.password or '')}".encode()
            headers = {"authorization": f"Basic {b64encode(user).decode()}", **headers}
        key = (os.getpid(), place.scheme, place.netloc)  # a forked child shares its parent's sockets
        known = self._open.pop(key, None)
        if known is not None:
            try:
                return self._send(key, known, place, content, headers)
            except (ConnectionError, http.client.NotConnected):
                pass  # the server has closed it
        return self._send(key, self._connection(place), place, content, headers)

    def _send(
        self,
        key: _Key,
        connection: http.client.HTTPConnection,
        place: SplitResult,
        content: bytes,
        headers: Mapping[str, str],
    ) -> HttpResponse:
        path = f"{place.path or '/'}?{place.query}" if place.query else place.path or "/"
        try:
            response = _answer(connection, path, content, headers)
            about = {name.lower(): value for name, value in response.headers.items()}
            answer = HttpResponse(response.status, about, response.read())
        except BaseException:
            connection.close()
            raise
        self._open[key] = connection
        return answer

    def _connection(self, place: SplitResult) -> http.client.HTTPConnection:
        host = place.hostname or ""
        if place.scheme == "https":
            return http.client.HTTPSConnection(host, place.port, timeout=self._timeout_s, context=_context())
        if place.scheme != "http":
            raise http.client.InvalidURL(f"{place.scheme}://{host}: spans are sent over http or https")
        return http.client.HTTPConnection(host, place.port, timeout=self._timeout_s)

    def close(self) -> None:
        """Close the connections."""
        while self._open:
            self._open.popitem()[1].close()


def _answer(
    connection: http.client.HTTPConnection, path: str, content: bytes, headers: Mapping[str, str]
) -> http.client.HTTPResponse:
    try:
        connection.request("POST", path, body=content, headers=dict(headers))
    except (ConnectionResetError, BrokenPipeError):
        if connection.sock is None:
            raise
        # A server that rejects a body because of its size responds and closes before it has received all of it.
    return connection.getresponse()


def _context() -> ssl.SSLContext:
    given = trusted_certificates()
    if isinstance(given, ssl.SSLContext):
        return given
    import certifi

    return ssl.create_default_context(cafile=certifi.where())
