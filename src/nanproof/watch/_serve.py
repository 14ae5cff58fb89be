"""`nanproof watch --web`: pages for the person who started it and no one else.

It listens on the loopback address only. Other people of the machine, and pages of other sites in the same browser, can reach that
too: so every request needs a random token, which goes from the printed address into a cookie that no script can read; the Host
header has to be ours, so that a name that someone else controls and points here does not get in; and no part of a request is ever
used as a path on the disk.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import socketserver
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from nanproof._errors import UsageError
from nanproof.watch._web import INDEX_CSP, Site

log = logging.getLogger("nanproof")
ADDRESS = "127.0.0.1"
MOST_AT_ONCE = 32
"""Requests that are answered at a time; more are told to come again."""
SILENT, LONGEST = 5.0, 30.0
"""Seconds without a byte after which a connection is closed; seconds after which it is closed whatever it does."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_ONWARD = '<!doctype html><meta http-equiv="refresh" content="0;url=/"><title>nanproof watch</title><a href="/">go on</a>'


class Server(ThreadingHTTPServer):
    """One thread a request, and not more than `MOST_AT_ONCE` of them."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere it would let another program take the port over
    request_queue_size = 64

    def __init__(self, site: Site, port: int = 0) -> None:
        self.site = site
        self.token = secrets.token_urlsafe(32)
        self.once = secrets.token_urlsafe(32)
        """For a browser that is started from here: other people can see its command line. Good for one request."""
        self._door = threading.Lock()
        self._seats = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._open: dict[socket.socket, float] = {}
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"--port {port} cannot be used ({why}). Choose another, or 0 for any that is free") from error
        self.port = int(self.server_address[1])
        self.hosts = {f"{name}:{self.port}" for name in (ADDRESS, "localhost")}
        self.cookie = f"nanproof-{self.port}"  # cookies do not know ports: two servers would take each other's

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    @property
    def url_once(self) -> str:
        return f"http://{ADDRESS}:{self.port}/?token={self.once}"

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without asking the network for our name
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._seats.acquire(blocking=False):
            with suppress(OSError):
                request.settimeout(0.2)
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(request, None)
            self._seats.release()

    def service_actions(self) -> None:
        """Twice a second: end what takes too long, one byte at a time or not."""
        for request, since in list(self._open.items()):
            if time.monotonic() - since > LONGEST:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("nanproof: a request to the page ended early", exc_info=True)

    def allows(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def allows_once(self, given: str) -> bool:
        with self._door:
            right = hmac.compare_digest(given.encode(), self.once.encode())
            if right:
                self.once = secrets.token_urlsafe(32)
            return right


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version, sys_version = "nanproof", ""
    timeout = SILENT

    def do_GET(self) -> None:
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            self._say(421, "this is not the name of this server: open the address that was printed")
            return
        path, _, query = self.path.partition("?")
        if (given := _token(query)) is not None:
            self._let_in(given)
        elif not self.server.allows(self._cookie()):
            self._say(403, "open the address that was printed in the terminal, with its token")
        else:
            self._answer(path)

    do_HEAD = do_GET

    def _not_allowed(self) -> None:
        self._say(405, "only GET and HEAD", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _not_allowed

    def _let_in(self, given: str) -> None:
        """The token goes into a cookie, and out of the address."""
        if not self.server.allows(given) and not self.server.allows_once(given):
            self._say(403, "the token is not right: open the address that was printed in the terminal")
            return
        cookie = {"Set-Cookie": f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"}
        if self.headers.get("Sec-Fetch-Site") == "cross-site":
            # Come here by a link on another page: a redirect would still count as that page's, and be sent no strict cookie.
            self._send(200, _ONWARD.encode(), {**cookie, "Content-Type": "text/html; charset=utf-8"})
        else:
            self._say(303, "", {**cookie, "Location": "/"})

    def _cookie(self) -> str | None:
        for part in self.headers.get("Cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.server.cookie:
                return str(value)
        return None

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
        headers = {"ETag": found.tag, "Vary": "Accept-Encoding", "Content-Security-Policy": found.csp, "Content-Type": found.kind}
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
        for name, value in {"Content-Security-Policy": INDEX_CSP, **_HEADERS, **headers}.items():
            self.send_header(name, value)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status != 304:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses hold the token."""


def _token(query: str) -> str | None:
    try:
        return parse_qs(query, keep_blank_values=True, max_num_fields=20).get("token", [None])[0]
    except ValueError:
        return None


def _takes_gzip(accepted: str) -> bool:
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
