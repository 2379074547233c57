"""Requests of at most 32 MB that want to fill a server or hold it up, and what each costs.

    python tests/redteam/bombs.py

asks a server of its own, in another process, and prints for each the status, by how much the server's memory rose at
most, and how long ``/healthz`` took at most meanwhile.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

SIZE = 32 * 1024 * 1024 - 4096
PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
GZIP = {"content-encoding": "gzip"}


def _block(tag: int, body: bytes) -> bytes:
    size, out = len(body), bytearray([tag])
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size]) + body


def _filled(head: bytes, item: bytes, tail: bytes, size: int = SIZE) -> bytes:
    return head + item * ((size - len(head) - len(tail)) // len(item)) + tail[:]


def _listed(head: bytes, item: bytes, tail: bytes, size: int = SIZE) -> bytes:
    return _filled(head, item + b",", item + tail, size)


def spans_protobuf(item: bytes = b"\x12\x00", size: int = SIZE) -> bytes:
    """An OTLP request of spans that are two bytes each."""
    return _block(0x0A, _block(0x12, item * ((size - 32) // len(item))))


def _valid_span() -> bytes:
    return _block(0x12, b"\x0a\x10" + b"a" * 16 + b"\x12\x08" + b"b" * 8)


OTLP = b'{"resourceSpans":[{"scopeSpans":[{"spans":['
CHAT = b'{"model":"policy","messages":['
USER = b'{"role":"user","content":""}'
_KEY = _block(0x12, b"\x4a\x00" * 1_000_000)
TEXT = b"The quick brown fox jumps over the lazy dog, and then some. "
NESTED = json.dumps({"role": "user", "content": "[" * 1000}).encode()


def bombs() -> dict[str, tuple[str, dict[str, str], bytes]]:
    """The requests by name: path, headers, body."""
    attribute = b'{"key":"input.value","value":{"stringValue":"' + b"[]," * 5_000_000 + b'[]"}}'
    kind = b'{"key":"openinference.span.kind","value":{"stringValue":"LLM"}}'
    ids = b'"traceId":"' + b"a" * 32 + b'","spanId":"' + b"b" * 16 + b'","startTimeUnixNano":"1","endTimeUnixNano":"2"'
    one = OTLP + b"{" + ids + b',"name":"n","attributes":[' + kind + b"," + attribute + b"]}]}]}]}"
    return {
        "empty spans, protobuf": ("/v1/traces", PROTOBUF, spans_protobuf()),
        "empty spans, protobuf, gzip": ("/v1/traces", {**PROTOBUF, **GZIP}, gzip.compress(spans_protobuf())),
        "16.7 million empty spans, gzip": (
            "/v1/traces", {**PROTOBUF, **GZIP}, gzip.compress(spans_protobuf(size=2 * 16_700_000)),
        ),
        "empty attributes, protobuf": ("/v1/traces", PROTOBUF, _block(0x0A, _block(0x12, _KEY * 16))),
        "short valid spans, protobuf": ("/v1/traces", PROTOBUF, spans_protobuf(_valid_span())),
        "empty spans, JSON": ("/v1/traces", JSON, _listed(OTLP, b"{}", b"]}]}]}")),
        "empty spans, JSON, gzip": ("/v1/traces", {**JSON, **GZIP}, gzip.compress(_listed(OTLP, b"{}", b"]}]}]}"))),
        "JSON in an attribute": ("/v1/traces", JSON, one),
        "empty messages": ("/v1/chat/completions", JSON, _listed(CHAT, USER, b"]}")),
        "empty messages, gzip": ("/v1/chat/completions", {**JSON, **GZIP}, gzip.compress(_listed(CHAT, USER, b"]}"))),
        "10,000 messages": ("/v1/chat/completions", JSON, _listed(CHAT, USER, b"]}", 9_900 * (len(USER) + 1))),
        "one long message": (
            "/v1/chat/completions", JSON, _filled(CHAT + b'{"role":"user","content":"', TEXT, b'"}]}'),
        ),
        "one long message, gzip": (
            "/v1/chat/completions", {**JSON, **GZIP},
            gzip.compress(_filled(CHAT + b'{"role":"user","content":"', TEXT, b'"}]}')),
        ),
        "token ids": ("/v1/completions", JSON, _listed(b'{"model":"policy","prompt":[', b"1", b"]}")),
        "brackets": ("/v1/chat/completions", JSON, _listed(b'{"model":"policy","messages":[', b"[]", b"]}")),
        "deep": ("/v1/chat/completions", JSON, b'{"model":"policy","messages":' + b"[" * (SIZE // 2)),
        "rollouts": ("/api/rollouts", JSON, _listed(b'{"rollouts":[', b"{}", b"]}")),
        "query": ("/api/query", JSON, _listed(b'{"what":"spans","trace_ids":[', b'"a"', b"]}")),
        "calls of token ids": (
            "/api/calls", JSON,
            _listed(b'{"calls":[{"call_id":"c","choices":[{"token_ids":[', b"123456,123456", b"]}]}]}"),
        ),
    }  # fmt: skip


def serve(folder: str, told: Any) -> None:
    """Serve in a process of its own, until it is ended."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.fakes import FakeEngine, served

    with served(Path(folder), FakeEngine()) as server:
        told.send((server.url, server.keys.issue("admin"), server.key("a")))
        told.recv()


def resident(pid: int) -> int:
    """Return a process's memory in bytes."""
    fields = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmRSS"))


@contextmanager
def watched(pid: int, url: str) -> Iterator[dict[str, float]]:
    """Note the most memory and the slowest ``/healthz`` inside the block."""
    before, done = resident(pid), threading.Event()
    found = {"megabytes": 0.0, "stall_s": 0.0}

    def look() -> None:
        while not done.wait(0.005):
            found["megabytes"] = max(found["megabytes"], (resident(pid) - before) / 1e6)

    def ask() -> None:
        with httpx.Client(timeout=120) as client:
            while not done.wait(0.02):
                began = time.monotonic()
                client.get(f"{url}/healthz")
                found["stall_s"] = max(found["stall_s"], time.monotonic() - began)

    threads = [threading.Thread(target=each) for each in (look, ask)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    try:
        yield found
    finally:
        time.sleep(0.1)
        done.set()
        for thread in threads:
            thread.join()


def unfinished(url: str, key: str | None, path: str, count: int = 60) -> str:
    """Open requests whose bodies of 32 MB lack their last byte; give what was answered."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {SIZE}\r\n"
    head += (f"Authorization: Bearer {key}\r\n" if key else "") + "\r\n"
    connections, answers = [], []
    for _ in range(count):
        connection = socket.create_connection((host, int(port)), timeout=60)
        connections.append(connection)
        try:
            connection.sendall(head.encode())
            connection.sendall(b" " * (SIZE - 1))
        except OSError:
            pass
        connection.settimeout(0.05)
        try:
            answers.append(connection.recv(100)[9:12].decode())
        except OSError:
            answers.append("waits")
    for connection in connections:
        connection.close()
    return ", ".join(f"{answers.count(each)} {each}" for each in sorted(set(answers)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    worst = {"megabytes": 0.0, "stall_s": 0.0}
    ours, theirs = multiprocessing.get_context("spawn").Pipe()

    def told(name: str, act: Callable[[], str]) -> None:
        if given.only not in name:
            return
        with watched(process.pid or 0, url) as found:
            answer = act()
        print(f"{name:34} {answer:18} {found['megabytes']:7.0f} MB {found['stall_s']:7.2f} s", flush=True)
        for what, most in found.items():
            worst[what] = max(worst[what], most)

    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, theirs))
        process.start()
        url, admin, attempt = ours.recv()
        with httpx.Client(base_url=url, timeout=300) as client:
            for path in ("/v1/chat/completions", "/v1/traces", "/api/query"):
                client.post(path, json={}, headers={"authorization": f"Bearer {admin}"})  # what is imported once
            for name, (path, headers, body) in bombs().items():
                key = admin if path.startswith("/api/") else attempt
                sent = {**headers, "authorization": f"Bearer {key}"}
                told(name, lambda: str(client.post(path, content=body, headers=sent).status_code))  # noqa: B023
        told("60 unfinished, no key, /api", lambda: unfinished(url, None, "/api/query"))
        told("60 unfinished, attempt's key, chat", lambda: unfinished(url, attempt, "/v1/chat/completions"))
        ours.send("end")
        process.join()
    print(f"most: {worst['megabytes']:.0f} MB, {worst['stall_s']:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
