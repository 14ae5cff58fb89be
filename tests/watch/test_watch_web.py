"""The page of `nanproof watch --web`: who gets in, what is served, and that one who hangs keeps no one else waiting."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack, closing, contextmanager, suppress

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


def ask(server: Server, path: str = "/page", method: str = "GET", known: bool = True, **headers: str) -> Answer:
    """One request; with the token, if `known`."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        token = {"Authorization": f"Bearer {server.token}"} if known else {}
        connection.request(method, path, headers={**token, **{name.replace("_", "-"): text for name, text in headers.items()}})
        return Answer(connection.getresponse())


def test_who_has_no_token_sees_nothing_of_any_run(tmp_path):
    """The page that anybody gets is the same whatever runs there are."""
    run(tmp_path / "SECRET" / "one", 3)
    with served(tmp_path / "SECRET") as server, served(tmp_path / "nothing") as empty:
        for path in ("/", "/run/0/", "/run/7/", "/?x=1"):
            shell = ask(server, path, known=False)
            assert shell.status == 200 and shell.body == ask(empty, "/", known=False).body == ask(server, path).body
            assert b"SECRET" not in shell.body
        for path in ("/page", "/data", "/run/0/page", "/run/0/data", "/enter", "/nothing", "/run/0", "/steps.jsonl"):
            found = ask(server, path, known=False)
            assert found.status == 401 and b"SECRET" not in found.body and b"token" in found.body
            assert found.headers["WWW-Authenticate"] == "Bearer"


def test_nothing_but_the_token_lets_in(ended):
    with served(ended) as server:
        good = server.token
        wrong = [good[:-1], good + "x", "", "\u00e4", good.swapcase(), server.once, f"{good} x", f" {good[1:]}"]
        for path in ("/page", "/data", "/enter"):
            for token in wrong[:-3] if path == "/enter" else wrong:
                given = token.encode().decode("latin-1")
                assert ask(server, path, known=False, Authorization=f"Bearer {given}").status == 401
            assert ask(server, path, known=False, Authorization=f"Basic {good}").status == 401
            assert ask(server, path, known=False, Cookie=f"nanproof-{server.port}={good}; token={good}").status == 401
            assert ask(server, f"{path}?token={good}", known=False).status == 401, "addresses end up in histories and logs"
            assert ask(server, path, known=False, Authorization=f"bearer {good}").status == 200
        assert len({served_token(ended) for _ in range(5)}) == 5 and len(good) >= 43


def served_token(ended) -> str:
    with Server(Site(Watched([ended]), PAGES)) as server:
        return server.token


def test_no_cookie_is_ever_set(ended):
    """A browser sends a cookie of 127.0.0.1 to every port of it, whoever listens there."""
    with served(ended) as server:
        for path in ("/", "/enter", "/page", "/data", "/nothing"):
            for known in (False, True):
                assert ask(server, path, known=known).headers["Set-Cookie"] is None


def test_the_token_is_only_in_the_fragment_which_no_browser_sends(ended):
    with served(ended) as server:
        address, _, fragment = server.url.partition("#")
        assert address == f"http://127.0.0.1:{server.port}/" and fragment == f"token={server.token}"
        assert server.token not in ask(server, "/", known=False).body.decode()


def test_the_address_for_the_browser_is_good_for_one_request(ended):
    """Other people of the machine can see a browser's command line."""
    with served(ended) as server:
        once = server.url_once.partition("#token=")[2]
        assert server.token not in server.url_once
        assert ask(server, "/data", known=False, Authorization=f"Bearer {once}").status == 401
        first = ask(server, "/enter", known=False, Authorization=f"Bearer {once}")
        assert first.status == 200 and first.body.decode() == server.token
        assert ask(server, "/enter", known=False, Authorization=f"Bearer {once}").status == 401
        assert ask(server, "/enter").body.decode() == server.token


def test_a_page_of_another_site_cannot_read_it(ended):
    """Not even with the token: the header needs a question first, and no answer ever allows another origin."""
    with served(ended) as server:
        asked = {"Origin": "http://evil.example", "Sec_Fetch_Site": "cross-site"}
        before = ask(server, "/data", "OPTIONS", False, Access_Control_Request_Headers="authorization", **asked)
        assert before.status == 405
        for found in (before, ask(server, "/data", **asked), ask(server, "/", **asked)):
            assert not [name for name in found.headers if name.lower().startswith("access-control-")]
            assert found.headers["Cross-Origin-Resource-Policy"] == "same-origin" and found.headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:PORT", "[::1]:PORT", ""]
)
def test_names_that_are_not_ours_do_not_get_in(host, ended):
    """A name that someone else controls can be pointed at this address after the page was loaded: DNS rebinding."""
    with served(ended) as server:
        for path in ("/", "/page", "/enter"):
            assert ask(server, path, Host=host.replace("PORT", str(server.port))).status == 421
        assert ask(server, Host=f"localhost:{server.port}").status == 200
        with closing(socket.create_connection(("127.0.0.1", server.port))) as plain:
            plain.sendall(f"GET /data HTTP/1.0\r\nAuthorization: Bearer {server.token}\r\n\r\n".encode())
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
            "/run/00/page",
            "/run/1/data",
            "/run/-1/page",
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
        seen = [ask(server), ask(server, "/data"), ask(server, known=False), ask(server, "/no"), ask(server, "/", "POST")]
        for found in (*seen, ask(server, "/", known=False)):
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


@pytest.mark.parametrize("count", [60, 500])
@pytest.mark.parametrize("sent", [b"", b"GET /page HTTP/1.0\r\nHost: ", b"GET / HTTP/1.0\r\nX: " + b"y" * 5000])
def test_those_who_hang_keep_no_one_waiting(count, sent, ended, monkeypatch):
    """Connections that send nothing, or never finish: whoever has the token is answered before the server gives them up."""
    monkeypatch.setattr(serve, "HEADERS", 1000.0)
    monkeypatch.setattr(serve.Handler, "timeout", 1000.0)
    with served(ended) as server, ExitStack() as opened:
        hanging = [opened.enter_context(closing(socket.create_connection(("127.0.0.1", server.port)))) for _ in range(count)]
        for one in hanging:
            with suppress(OSError):  # it was closed to make room
                one.sendall(sent)
        for path in ("/", "/page", "/data") * 3:
            assert ask(server, path).status == 200
        assert threading.active_count() < 100


def test_those_who_send_a_byte_now_and_then_keep_no_one_waiting(ended, monkeypatch):
    """While they go on, and new ones come, requests with the token are answered."""
    monkeypatch.setattr(serve, "HEADERS", 1000.0)
    monkeypatch.setattr(serve.Handler, "timeout", 1000.0)
    with served(ended) as server, ExitStack() as opened:
        stop = threading.Event()

        def drip() -> None:
            mine = deque(maxlen=100)
            while not stop.is_set():
                mine.append(opened.enter_context(closing(socket.create_connection(("127.0.0.1", server.port)))))
                for one in mine:
                    with suppress(OSError):
                        one.send(b"G")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            for _ in range(20):
                assert ask(server, "/data").status == 200
        finally:
            stop.set()
            dripping.join()


def test_a_connection_has_a_few_seconds_to_show_the_token(ended, monkeypatch):
    """However it fills them: a byte a second does not help."""
    monkeypatch.setattr(serve, "HEADERS", 0.3)
    with served(ended) as server, closing(socket.create_connection(("127.0.0.1", server.port))) as slow:
        began = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - began < 5:
                slow.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - began < 2
        until(lambda: not server._strangers)


def test_a_connection_that_has_shown_the_token_is_not_closed_for_strangers(ended, monkeypatch):
    """A long page on its way stays on its way."""
    inside, go = threading.Event(), threading.Event()

    def slow(run):
        inside.set()
        assert go.wait(10)
        return "<!doctype html>at last"

    with served(ended, pages=Pages(slow, PAGES.data)) as server, ExitStack() as opened:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(server, "/page")))
        asking.start()
        assert inside.wait(10)
        for _ in range(2 * serve.MOST_STRANGERS):
            opened.enter_context(closing(socket.create_connection(("127.0.0.1", server.port))))
        assert ask(server, "/", known=False).status == 200
        go.set()
        asking.join()
        assert answers[0].body == b"<!doctype html>at last"


def test_too_many_with_the_token_are_told_to_come_again(ended, monkeypatch):
    monkeypatch.setattr(serve, "MOST_AT_ONCE", 0)
    with served(ended) as server:
        found = ask(server, "/data")
        assert found.status == 503 and found.headers["Retry-After"] == "2"


def test_several_runs_have_a_list_and_keep_their_addresses(tmp_path):
    for name in ("one", "two"):
        run(tmp_path / name, 5)
    with served(tmp_path) as server:
        text = ask(server).body.decode()
        links = dict(re.findall(r'<a href="(/run/\d/)">(\w+)</a>', text))
        assert sorted(links.values()) == ["one", "two"]
        assert all(b"page of 5 steps" in ask(server, f"{path}page").body for path in links)
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
        assert body.count("<script") == 1 and "&lt;script&gt;" in body and body.replace("\n", "").isprintable()


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
        allowed = ask(server, "/", known=False).headers["Content-Security-Policy"]
        assert "unsafe" not in allowed and "connect-src 'self'" in allowed
        page = ask(server)
        own = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.body.decode())
        assert page.status == 200 and own is not None
        hashes = set(re.findall(r"'sha256-[^']*'", own[1]))
        assert len(hashes) > 5 and hashes < set(re.findall(r"'sha256-[^']*'", allowed)), "the entrance lets the report run"
        first = ask(server, "/data")
        train(guard, 10, 20)
        second = ask(server, "/data", If_None_Match=first.headers["ETag"])
        assert second.status == 200 and second.body != first.body
        assert json.loads(second.body, parse_constant=lambda c: pytest.fail(c))["name"] == "run"
    guard.close()
