"""`nanproof watch --web`: pages for the person who started it and no one else.

It listens on the loopback address only. Other people of the machine, and pages of other sites in the same browser, can reach that
too. So everything about a run needs a random token. It is in the fragment of the printed address, which a browser sends to
nobody; the script of the page sends it in a header. There is no cookie: a browser would send one to every other port of this
machine. The Host header has to be ours, so that a name that someone else controls and points here does not get in; and no part of
a request is ever used as a path on the disk.

A connection that has not shown the token yet keeps no one waiting: it has a few seconds, and of too many the oldest is closed.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import socket
import socketserver
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nanproof._errors import UsageError
from nanproof.watch._web import Site, entrance

log = logging.getLogger("nanproof")
ADDRESS = "127.0.0.1"
MOST_AT_ONCE = 32
"""Requests with the token that are answered at a time; more are told to come again."""
MOST_STRANGERS = 64
"""Connections that have not shown the token. For one more, the oldest is closed."""
SILENT, HEADERS, LONGEST = 5.0, 5.0, 30.0
"""Seconds without a byte after which a connection is closed; seconds in which the token has to come; seconds after which a
connection is closed whatever it does."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
_PLACE = re.compile(r"/(?:run/\d{1,9}/)?", re.ASCII)
"""Where anybody gets the entrance, whether or not there is such a run."""


class Server(ThreadingHTTPServer):
    """One thread a connection."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere it would let another program take the port over
    request_queue_size = 1024

    def __init__(self, site: Site, port: int = 0) -> None:
        self.site = site
        self.token = secrets.token_urlsafe(32)
        self.once = secrets.token_urlsafe(32)
        """For a browser that is started from here: other people can see its command line. Good for one request."""
        self.entrance = entrance()
        self._door = threading.Lock()
        self._strangers: dict[Any, float] = {}
        """Connections that have not shown the token, oldest first, and when they came."""
        self._known: dict[Any, float] = {}
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"--port {port} cannot be used ({why}). Choose another, or 0 for any that is free") from error
        self.port = int(self.server_address[1])
        self.hosts = {f"{name}:{self.port}" for name in (ADDRESS, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/#token={self.token}"

    @property
    def url_once(self) -> str:
        return f"http://{ADDRESS}:{self.port}/#token={self.once}"

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without asking the network for our name
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._door:
            oldest = next(iter(self._strangers)) if len(self._strangers) >= MOST_STRANGERS else None
            self._strangers.pop(oldest, None)
            self._strangers[request] = time.monotonic()
        _end(oldest)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._door:
                self._strangers.pop(request, None)
                self._known.pop(request, None)

    def service_actions(self) -> None:
        """Twice a second: end what takes too long, one byte at a time or not."""
        now = time.monotonic()
        with self._door:
            late = [one for one, since in self._strangers.items() if now - since > HEADERS]
            late += [one for one, since in self._known.items() if now - since > LONGEST]
        for request in late:
            _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("nanproof: a request to the page ended early", exc_info=True)

    def allows(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def allows_once(self, given: str) -> bool:
        with self._door:
            right = hmac.compare_digest(given.encode(), self.once.encode())
            if right:
                self.once = secrets.token_urlsafe(32)
            return right

    def seat(self, request: Any) -> bool:
        """A connection has shown the token: it is not closed to make room for others. False if there are too many."""
        with self._door:
            self._strangers.pop(request, None)
            if len(self._known) < MOST_AT_ONCE:
                self._known[request] = time.monotonic()
            return request in self._known


def _end(request: Any) -> None:
    """Wake the thread that reads from a connection, or writes to it: there is nobody any more."""
    if request is not None:
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version, sys_version = "nanproof", ""
    timeout = SILENT

    def do_GET(self) -> None:
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            self._say(421, "this is not the name of this server: open the address that was printed")
            return
        path = self.path.partition("?")[0]
        if _PLACE.fullmatch(path):
            page, policy = self.server.entrance
            self._send(200, page.encode(), {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy})
            return
        if path == "/favicon.ico":  # every browser asks for it
            self._send(204, b"", {})
            return
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else ""
        if not self.server.allows(given) and not (path == "/enter" and self.server.allows_once(given)):
            self._say(401, "open the address that was printed in the terminal, with its token", {"WWW-Authenticate": "Bearer"})
        elif not self.server.seat(self.connection):
            self._say(503, "too many requests at a time", {"Retry-After": "2"})
        elif path == "/enter":
            self._send(200, self.server.token.encode(), {"Content-Type": "text/plain; charset=utf-8"})
        else:
            self._answer(path)

    do_HEAD = do_GET

    def _not_allowed(self) -> None:
        self._say(405, "only GET and HEAD", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _not_allowed

    def _answer(self, path: str) -> None:
        try:
            found = self.server.site.answer(path)
        except Exception:
            log.exception("nanproof: the page could not be made")
            self._say(500, "the page could not be made: see the terminal")
            return
        if found is None:
            self._say(404, "there is no such page")
            return
        headers = {"ETag": found.tag, "Vary": "Accept-Encoding", "Content-Type": found.kind}
        if found.tag in [tag.strip() for tag in self.headers.get("If-None-Match", "").split(",")]:
            self._send(304, b"", headers)
        elif found.packed and _takes_gzip(self.headers.get("Accept-Encoding", "")):
            self._send(200, found.packed, {**headers, "Content-Encoding": "gzip"})
        else:
            self._send(200, found.body, headers)

    def _say(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are no news."""


def _takes_gzip(accepted: str) -> bool:
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
