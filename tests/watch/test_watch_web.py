"""The page of `nanproof watch --web`: who gets in, what is served, and that one who hangs keeps no one else waiting."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest

from nanproof import UsageError
from nanproof.watch import _serve as serve
from nanproof.watch._runs import Watched
from nanproof.watch._serve import Server
from nanproof.watch._web import Pages, Site, report_pages
from watch.made import guard_in, run, train, until
from watch.test_watched import HOSTILE, hostile

PAGES = Pages(lambda run: f"<!doctype html>page of {run.steps} steps" + " " * 2000, lambda run: {"steps": run.steps})


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs") / "run", 12)


@contextmanager
def served(*paths, pages=PAGES, every=0.0):
    with Server(Site(Watched(paths, clock=lambda: 50 * time.monotonic()), pages, every=every)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()


def ask(server: Server, path: str = "/", method: str = "GET", known: bool = True, **headers: str) -> Answer:
    """One request; with the cookie, if `known`."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        cookie = {"Cookie": f"a=b; {server.cookie}={server.token}"} if known else {}
        connection.request(method, path, headers={**cookie, **{name.replace("_", "-"): text for name, text in headers.items()}})
        return Answer(connection.getresponse())


def test_the_address_lets_in_once_and_loses_its_token(ended):
    with served(ended) as server:
        assert ask(server, known=False).status == 403
        first = ask(server, server.url.partition(str(server.port))[2], known=False)
        assert first.status == 303 and first.headers["Location"] == "/"
        cookie = first.headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert ask(server, known=False, Cookie=cookie.split(";")[0]).status == 200
        assert b"page of 12 steps" in ask(server).body


def test_nothing_but_the_token_lets_in(ended):
    with served(ended) as server:
        wrong = [server.token[:-1], server.token + "x", "", "\u00e4", server.token.swapcase()]
        for token in wrong:
            assert ask(server, f"/?token={token.encode('unicode_escape').decode()}", known=False).status == 403
            assert ask(server, known=False, Cookie=f"{server.cookie}={token.encode('unicode_escape').decode()}").status == 403
        assert ask(server, known=False, Cookie=f"nanproof-1={server.token}").status == 403, "the cookie of another port"
        for path in ("/data", "/run/0/", "/run/0/data", "/nothing"):
            assert ask(server, path, known=False).status == 403
        assert len({served_token(ended) for _ in range(5)}) == 5 and len(server.token) >= 43


def served_token(ended) -> str:
    with Server(Site(Watched([ended]), PAGES)) as server:
        return server.token


def test_the_address_for_the_browser_is_good_for_one_request(ended):
    """Other people of the machine can see a browser's command line."""
    with served(ended) as server:
        path = server.url_once.partition(str(server.port))[2]
        assert server.token not in path
        assert ask(server, path, known=False).status == 303
        assert ask(server, path, known=False).status == 403


def test_a_link_on_another_page_gets_a_page_that_goes_on(ended):
    """A redirect of a request that another site began is sent no strict cookie."""
    with served(ended) as server:
        found = ask(server, f"/?token={server.token}", known=False, Sec_Fetch_Site="cross-site")
        assert found.status == 200 and b'url=/"' in found.body and "Set-Cookie" in found.headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:PORT", "[::1]:PORT", ""]
)
def test_names_that_are_not_ours_do_not_get_in(host, ended):
    """A name that someone else controls can be pointed at this address after the page was loaded: DNS rebinding."""
    with served(ended) as server:
        assert ask(server, Host=host.replace("PORT", str(server.port))).status == 421
        assert ask(server, Host=f"localhost:{server.port}").status == 200
        with closing(socket.create_connection(("127.0.0.1", server.port))) as plain:
            plain.sendall(f"GET / HTTP/1.0\r\nCookie: {server.cookie}={server.token}\r\n\r\n".encode())
            assert plain.recv(100).startswith(b"HTTP/1.0 421"), "no Host at all"


def test_only_the_loopback_address_is_listened_on(ended):
    with served(ended) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as other:
            other.settimeout(2)
            with pytest.raises(OSError):
                other.connect(("127.0.0.2", server.port))  # every other address of this machine, the loopback ones too


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_only_reading_is_allowed(method, ended):
    with served(ended) as server:
        found = ask(server, "/", method)
        assert (found.status, found.headers["Allow"]) == (405, "GET, HEAD")


def test_head_is_get_without_the_body(ended):
    with served(ended) as server:
        got, head = ask(server), ask(server, method="HEAD")
        assert head.body == b"" and head.status == 200
        assert head.headers["Content-Length"] == got.headers["Content-Length"] == str(len(got.body))


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/steps.jsonl",
            "/../run/steps.jsonl",
            "/run/0/steps.jsonl",
            "/run/00/",
            "/run/1/",
            "/run/-1/",
            "/run/0",
            "/run/",
            "/.",
        ),
        *("/%2e%2e/", "/run/0/data/", "/run/%D9%A0/", "/data?x=1#y/../", "/run/999999999999999999999/"),
    ],
)
def test_no_path_reaches_the_disk(path, ended):
    with served(ended) as server:
        found = ask(server, path)
        assert found.status == (200 if path.startswith("/data?") else 404)
        assert b'"kind"' not in found.body


def test_headers_close_every_door(ended):
    with served(ended) as server:
        for found in (ask(server), ask(server, "/data"), ask(server, known=False), ask(server, "/no"), ask(server, "/", "POST")):
            assert found.headers["X-Content-Type-Options"] == "nosniff"
            assert found.headers["Referrer-Policy"] == "no-referrer"
            assert found.headers["Cache-Control"] == "no-store"
            policy = found.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "http" not in policy
            assert "Python" not in found.headers.get("Server", "") and "Access-Control-Allow-Origin" not in found.headers


def test_what_has_not_changed_is_not_sent_again_and_what_is_long_is_packed(tmp_path):
    guard = guard_in(tmp_path / "run")
    train(guard, 0, 5)
    with served(tmp_path / "run") as server:
        found = ask(server, Accept_Encoding="br, gzip;q=0.5")
        assert found.headers["Content-Encoding"] == "gzip" and b"page of 5 steps" in gzip.decompress(found.body)
        for refused in ("", "br", "gzip;q=0"):
            assert b"page of 5 steps" in ask(server, Accept_Encoding=refused).body
        tag = ask(server, "/data").headers["ETag"]
        same = ask(server, "/data", If_None_Match=tag)
        assert (same.status, same.body, same.headers["ETag"]) == (304, b"", tag)
        train(guard, 5, 6)
        changed = ask(server, "/data", If_None_Match=tag)
        assert changed.status == 200 and json.loads(changed.body) == {"steps": 6}
    guard.close()


def test_many_who_ask_at_once_look_once(tmp_path, monkeypatch):
    looks = []
    watched = Watched([run(tmp_path / "run", 5)])
    look = watched.look
    monkeypatch.setattr(watched, "look", lambda: looks.append(time.monotonic()) or look())
    site = Site(watched, PAGES, every=60.0)
    threads = [threading.Thread(target=site.answer, args=("/data",)) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looks) == 1


def test_one_who_hangs_keeps_no_one_waiting_and_too_many_are_told_so(ended, monkeypatch):
    """Connections that say nothing, or never finish: others are answered; above the cap they get 503, and when time is up there
    is room again."""
    monkeypatch.setattr(serve, "LONGEST", 0.5)
    with served(ended) as server:
        hanging = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(serve.MOST_AT_ONCE - 1)]
        for one in hanging[::2]:
            one.sendall(b"GET / HTTP/1.0\r\nHost: ")
        assert ask(server).status == 200
        hanging.append(socket.create_connection(("127.0.0.1", server.port)))
        until(lambda: server._seats._value == 0)
        assert ask(server).status == 503
        until(lambda: server._seats._value == serve.MOST_AT_ONCE)
        assert ask(server).status == 200
        for one in hanging:
            one.close()


def test_several_runs_have_a_list_and_keep_their_addresses(tmp_path):
    for name in ("one", "two"):
        run(tmp_path / name, 5)
    with served(tmp_path) as server:
        text = ask(server).body.decode()
        links = dict(re.findall(r'<a href="(/run/\d/)">(\w+)</a>', text))
        assert sorted(links.values()) == ["one", "two"]
        assert all(b"page of 5 steps" in ask(server, path).body for path in links)
        run(tmp_path / "three", 6)
        until(lambda: b"three" in ask(server).body)
        after = dict(re.findall(r'<a href="(/run/\d/)">(\w+)</a>', ask(server).body.decode()))
        assert links.items() < after.items()
        (new,) = after.keys() - links.keys()
        assert json.loads(ask(server, f"{new}data").body) == {"steps": 6}


def test_a_run_that_is_not_there_yet(tmp_path):
    with served(tmp_path / "later") as server:
        assert b"waiting" in ask(server).body and ask(server, "/data").status == 404
        run(tmp_path / "later", 4)
        until(lambda: b"page of 4 steps" in ask(server).body)


def test_names_are_only_text_on_the_list(ended, tmp_path):
    hostile(ended, tmp_path / HOSTILE.replace("/", "_"))
    run(tmp_path / "other", 3)
    with served(tmp_path) as server:
        body = ask(server).body.decode()
        assert "<script" not in body and "&lt;script&gt;" in body and body.replace("\n", "").isprintable()


def test_a_page_that_cannot_be_made_is_an_answer_too(ended, caplog):
    def broken(run):
        raise RuntimeError("for the test")

    with served(ended, pages=Pages(broken, PAGES.data)) as server:
        assert ask(server).status == 500 and b"for the test" not in ask(server).body
        assert ask(server, "/data").status == 200
        assert "for the test" in caplog.text


def test_a_port_that_is_taken_is_named(ended):
    with Server(Site(Watched([ended]), PAGES)) as server, pytest.raises(UsageError, match=f"--port {server.port} .* 0 for any"):
        Server(Site(Watched([ended]), PAGES), server.port)


def test_the_report_itself_live(tmp_path):
    """The page of `nanproof report`: what may run on it is said in the header too, and its data grows with the run."""
    guard = guard_in(tmp_path / "run")
    train(guard, 0, 10)
    with served(tmp_path / "run", pages=report_pages()) as server:
        page = ask(server)
        assert page.status == 200 and "sha256-" in page.headers["Content-Security-Policy"]
        assert (
            "unsafe" not in page.headers["Content-Security-Policy"]
            and "connect-src 'self'" in page.headers["Content-Security-Policy"]
        )
        first = ask(server, "/data")
        train(guard, 10, 20)
        second = ask(server, "/data", If_None_Match=first.headers["ETag"])
        assert second.status == 200 and second.body != first.body
        assert json.loads(second.body, parse_constant=lambda c: pytest.fail(c))["name"] == "run"
    guard.close()
