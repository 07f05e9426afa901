"""A real HTTP server for the tests of transfers: it serves bytes with Range, and breaks off where a test says so."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What the server serves, and what it was asked.

    files      content by path
    types      Content-Type by path, where it is not application/octet-stream
    cuts       bytes after which each of the next responses breaks off, one entry a response
    redirects  where a path leads
    headers    further headers by path
    refusals   status codes by path
    errors     status codes of the next responses, one entry a response, before anything else happens
    ranges     whether Range is honoured
    gate       when given, a response waits for it before its second half
    asked      (path, Range header or "", Authorization header or "") of every request
    """

    files: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    ranges: bool = True
    gate: threading.Event | None = None
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve `site` within the block; its `url` then names the server."""

    class Handler(_Handler):
        pass

    Handler.site = site
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        if site.gate is not None:
            site.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *arguments: object) -> None:
        """Tests read `asked` instead."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        wanted = self.headers.get("Range", "")
        self.site.asked.append((path, wanted, self.headers.get("Authorization", "")))
        if self.site.errors:
            self.send_error(self.site.errors.pop(0))
        elif path in self.site.refusals:
            self.send_response(self.site.refusals[path])
            self._end_headers(path, length=0)
        elif path in self.site.redirects:
            self.send_response(302)
            self.send_header("Location", self.site.redirects[path])
            self.end_headers()
        elif path in self.site.files:
            self._send(path, self.site.files[path], wanted if self.site.ranges else "", with_body)
        else:
            self.send_error(404)

    def _send(self, path: str, content: bytes, wanted: str, with_body: bool) -> None:
        start = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-\d*", wanted)) else 0
        if start and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Type", self.site.types.get(path, "application/octet-stream"))
        self._end_headers(path, length=len(content) - start)
        if with_body:
            self._send_body(content[start:])

    def _end_headers(self, path: str, length: int) -> None:
        self.send_header("Content-Length", str(length))
        for name, value in self.site.headers.get(path, {}).items():
            self.send_header(name, value)
        self.end_headers()

    def _send_body(self, body: bytes) -> None:
        if self.site.cuts:
            body = body[: self.site.cuts.pop(0)]
            self.close_connection = True
        try:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if self.site.gate is not None:
                self.site.gate.wait(30)
            self.wfile.write(body[len(body) // 2 :])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client was killed or had enough
