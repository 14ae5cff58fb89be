"""The page of `nanproof watch --web` in a real browser: the printed address, a reload, a list of runs, and who sees the token."""

from __future__ import annotations

import http.server
import threading

import pytest

from nanproof.watch._web import report_pages
from report.looked import Looked
from watch.made import guard_in, run, train
from watch.test_watch_web import served

pytestmark = pytest.mark.browser
STEPS = "Number(/(\\d+) steps recorded/.exec(document.getElementById('summary').textContent)[1])"


def at_report(seen) -> None:
    seen.page.wait_for_selector("#plots canvas", timeout=8000)


def test_the_printed_address_shows_the_report_and_keeps_it_up_to_date(browser, tmp_path):
    """Nothing is complained about, the token leaves the address, and a reload needs no other."""
    guard = guard_in(tmp_path / "run")
    train(guard, 0, 10)
    with served(tmp_path / "run", pages=report_pages()) as server:
        seen = Looked(browser, server.url)
        at_report(seen)
        assert seen.page.url == f"http://127.0.0.1:{server.port}/" and seen.ask(STEPS) == 10
        assert seen.page.title() == "run: nanproof report"
        train(guard, 10, 15)
        seen.page.wait_for_selector("#summary:has-text('15 steps recorded')", timeout=8000)
        seen.page.reload()
        at_report(seen)
        assert seen.ask(STEPS) == 15
        train(guard, 15, 22)
        seen.page.wait_for_selector("#summary:has-text('22 steps recorded')", timeout=8000)
        seen.page.locator("#incidents details summary").first.click()
        seen.page.keyboard.press("l")
        assert seen.page.is_hidden("#lost") and seen.said == []
        assert seen.context.cookies() == [] and not any(server.token in url for url in seen.asked)
        seen.page.goto(f"{seen.page.url}#incident-1")
        seen.page.reload()
        at_report(seen)
        assert seen.ask("document.getElementById('incident-1').open") is True
    seen.page.wait_for_selector("#lost", state="visible", timeout=8000)
    seen.context.close()
    guard.close()


def test_without_the_token_nothing_is_shown_and_pasting_the_address_helps(browser, tmp_path):
    run(tmp_path / "run", 5)
    with served(tmp_path / "run", pages=report_pages()) as server:
        seen = Looked(browser, f"http://127.0.0.1:{server.port}/")
        seen.page.wait_for_selector("text=printed in the terminal")
        assert "run" not in seen.page.title().split()
        seen.page.goto(f"http://127.0.0.1:{server.port}/#token=wrong")
        seen.page.wait_for_selector("text=printed in the terminal")
        seen.page.goto(server.url)  # only the fragment is another, so the browser loads nothing by itself
        at_report(seen)
        seen.page.goto(server.url_once)
        at_report(seen)
        assert server.once != server.url and "token" not in seen.page.url
        seen.context.close()


def test_a_browser_without_storage_keeps_the_token_in_the_address(browser, tmp_path):
    run(tmp_path / "run", 5)
    with served(tmp_path / "run", pages=report_pages()) as server:
        page = browser.new_page()
        page.add_init_script("Object.defineProperty(window, 'sessionStorage', { get() { throw new Error('blocked'); } })")
        page.goto(server.url_once)
        page.wait_for_selector("#plots canvas", timeout=8000)
        assert page.url == server.url
        page.reload()
        page.wait_for_selector("#plots canvas", timeout=8000)
        page.close()


def test_the_list_of_runs_leads_to_each_also_in_a_tab_of_its_own(browser, tmp_path):
    for name in ("one", "two"):
        run(tmp_path / name, 5)
    with served(tmp_path, pages=report_pages()) as server:
        seen = Looked(browser, server.url)
        seen.page.wait_for_selector("#runs a")
        assert sorted(seen.page.locator("#runs a").all_inner_texts()) == ["one", "two"]
        with seen.context.expect_page() as opened:
            seen.page.locator("#runs a").first.click(modifiers=["Control"])
        opened.value.wait_for_selector("#plots canvas", timeout=8000)
        assert "token" not in opened.value.url
        run(tmp_path / "three", 5)
        seen.page.wait_for_selector("#runs a:has-text('three')", timeout=8000)
        seen.page.locator("#runs a", has_text="three").click()
        at_report(seen)
        assert seen.page.title() == "three: nanproof report" and "token" not in seen.page.url
        seen.page.go_back()
        seen.page.wait_for_selector("#runs a")
        assert seen.said == []
        seen.context.close()


def test_a_run_that_begins_later_takes_the_place_of_the_list(browser, tmp_path):
    with served(tmp_path / "later", pages=report_pages()) as server:
        seen = Looked(browser, server.url)
        seen.page.wait_for_selector("text=waiting")
        run(tmp_path / "later", 5)
        at_report(seen)
        assert seen.said == []
        seen.context.close()


def test_another_port_of_this_machine_learns_nothing(browser, tmp_path):
    """Its pages cannot read this server, and requests to it carry neither cookie nor token nor where they come from."""
    run(tmp_path / "run", 5)
    heard: list[str] = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append(f"{self.path} {self.headers}")
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=other.serve_forever, daemon=True)
    thread.start()
    try:
        with served(tmp_path / "run", pages=report_pages()) as server:
            seen = Looked(browser, server.url)
            at_report(seen)
            page = seen.context.new_page()
            page.goto(f"http://127.0.0.1:{other.server_port}/")
            fetched = (
                f"fetch('http://127.0.0.1:{server.port}/data', {{credentials: 'include'}}).then(() => 'read', () => 'refused')"
            )
            assert page.evaluate(fetched) == "refused"
            with_token = f"fetch('http://127.0.0.1:{server.port}/data', {{headers: {{Authorization: 'Bearer {server.token}'}}}})"
            assert page.evaluate(f"{with_token}.then(() => 'read', () => 'refused')") == "refused"
            assert page.evaluate("sessionStorage.length") == 0
            seen.page.goto(f"http://127.0.0.1:{other.server_port}/next")
            seen.context.close()
            told = "\n".join(heard)
            assert "/next" in told and server.token not in told and "Cookie" not in told and str(server.port) not in told
    finally:
        other.shutdown()
        other.server_close()
        thread.join()
