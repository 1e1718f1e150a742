"""The dashboard: what is served, under which policy, and in a browser what it shows and does."""

import gzip
import re
from importlib.resources import files

import pytest
from browser import Browser, chromium
from fake_service import FakeService, filled
from serving import Running, until
from starlette.testclient import TestClient

from attractor.serve.http.app import create_app
from attractor.serve.http.auth import SCOPES, add_key
from attractor.serve.http.settings import ServeSettings

FOLDER = files("attractor.serve").joinpath("dashboard")
OURS = sorted(each.name for each in FOLDER.iterdir())
LIVE = "document.getElementById('status-text').textContent === 'Live'"


@pytest.fixture(scope="module")
def client():
    return TestClient(create_app(FakeService(), ServeSettings()), base_url="http://127.0.0.1")


@pytest.mark.parametrize("name", [*OURS, "plotly.min.js"])
def test_files_are_served_from_here_as_what_they_are(client, name):
    answer = client.get(f"/dashboard/{name}")
    assert answer.status_code == 200
    kind = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["Content-Type"] == f"{kind[name.rpartition('.')[2]]}; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    again = client.get(f"/dashboard/{name}", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_packed_and_plain_are_the_same(client):
    plain = client.get("/dashboard/plotly.min.js", headers={"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    with client.stream("GET", "/dashboard/plotly.min.js", headers={"Accept-Encoding": "gzip"}) as packed:
        assert gzip.decompress(b"".join(packed.iter_raw())) == plain.content


def test_the_policy_allows_no_script_but_ours(client):
    parts = client.get("/").headers["Content-Security-Policy"].split("; ")
    policy = dict(part.split(" ", 1) for part in parts)
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe-eval" not in str(policy)
    assert [name for name, value in policy.items() if "unsafe-inline" in value] == ["style-src-attr"]


def test_nothing_comes_from_elsewhere_and_nothing_is_put_in_as_markup():
    for name in OURS:
        text = FOLDER.joinpath(name).read_text(encoding="utf-8")
        assert text.isascii(), name
        outside = re.sub(r'xmlns="http://www.w3.org/2000/svg"', "", text)
        assert not re.search(
            r"(https?:)?//[a-z]", re.sub(r"^\s*//.*|; //.*|\{ //.*", "", outside, flags=re.M)
        ), name
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "localStorage",
        ):
            assert way not in text, name


def test_the_page_has_no_inline_script_or_style():
    page = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    for name in re.findall(r'/dashboard/([\w.]+)"', page):
        assert name in (*OURS, "plotly.min.js")


def test_what_scripts_look_for_is_on_the_page():
    page = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
    wanted = set()
    for name in OURS:
        if name.endswith(".js"):
            text = FOLDER.joinpath(name).read_text(encoding="utf-8")
            wanted |= set(re.findall(r'(?:\$|draw|nothing)\("([a-z-]+)"', text))
    assert len(wanted) > 30
    assert {name for name in wanted if f'id="{name}"' not in page} == set()


# --- in a browser

in_browser = [pytest.mark.browser, pytest.mark.skipif(chromium() is None, reason="there is no Chromium")]


@pytest.fixture(scope="module")
def browser():
    with Browser.find() as browser:
        yield browser


def seen(page, script):
    return page.evaluate(f"document.{script}")


class TestInBrowser:
    pytestmark = in_browser

    @pytest.fixture
    def service(self):
        return filled(24)

    @pytest.fixture
    def place(self, service):
        settings = ServeSettings()
        with Running(create_app(service, settings), settings) as running:
            yield f"http://127.0.0.1:{running.port}/"

    @pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
    def test_it_draws_everything_and_fits(self, browser, place, width, dark):
        page = browser.page(place, width=width, dark=dark)
        page.wait(LIVE)
        page.wait("document.querySelectorAll('.chart[aria-label] .plotly').length === 6")
        assert seen(page, "getElementById('tile-version').textContent") == "v25"
        assert page.evaluate("document.querySelectorAll('#overlays tbody tr').length") == 3
        assert seen(page, "documentElement.scrollWidth") <= width
        assert [told for told in page.complaints() if "Applying inline style" not in told] == []
        assert sum("Applying inline style" in told for told in page.complaints()) <= 1  # plotly.js, for maps
        assert all(url.startswith((place, "data:")) for url in page.requests())

    def test_the_playground_colours_tokens_by_path(self, browser, place):
        page = browser.page(place)
        page.wait(LIVE)
        page.evaluate("document.getElementById('play-tokens').value = 30")
        page.evaluate("document.getElementById('play').requestSubmit()")
        page.wait("document.querySelectorAll('.token').length === 30")
        page.wait("!document.getElementById('play-details').hidden")
        assert seen(page, "getElementById('play-legend').textContent") == "basekjvnews-2026support"
        assert (
            page.evaluate("new Set([...document.querySelectorAll('.token')].map((t) => t.className)).size")
            > 1
        )
        assert page.evaluate("document.querySelectorAll('#play-table tbody tr').length") == 30
        assert "30 tokens with v25" in seen(page, "getElementById('play-message').textContent")

    def test_rolling_back_and_forgetting_ask_first(self, browser, place, service):
        page = browser.page(place)
        page.wait(LIVE)
        page.evaluate("document.querySelector('[aria-label=\"Roll back to version 22\"]').click()")
        page.wait("document.getElementById('confirm').open")
        page.press("Escape")
        page.wait("!document.getElementById('confirm').open")
        assert service.version == 25
        page.evaluate("document.querySelector('[aria-label=\"Roll back to version 22\"]').click()")
        page.evaluate("document.getElementById('confirm-yes').focus()")
        page.press("Enter")
        until(lambda: service.version == 26)
        assert service.history[-1]["to"] == 22
        page.wait("document.getElementById('tile-version').textContent === 'v26'")
        page.evaluate("document.querySelector('[aria-label=\"Forget kjv\"]').click()")
        page.evaluate("document.getElementById('confirm-yes').click()")
        until(lambda: "kjv" not in service.sources)
        page.wait("document.querySelectorAll('#overlays tbody tr').length === 2")

    def test_an_empty_server_says_so(self, browser):
        settings = ServeSettings()
        with Running(create_app(FakeService(), settings), settings) as running:
            page = browser.page(f"http://127.0.0.1:{running.port}/")
            page.wait(LIVE)
            assert "No lessons yet" in seen(page, "getElementById('loss').textContent")
            assert "base alone" in seen(page, "getElementById('overlays').textContent")

    def test_a_key_opens_it_and_stays_in_the_tab(self, browser, tmp_path):
        key = add_key(tmp_path / "keys.json", SCOPES)
        settings = ServeSettings(keys=tmp_path / "keys.json")
        with Running(create_app(filled(6), settings), settings) as running:
            page = browser.page(f"http://127.0.0.1:{running.port}/")
            page.wait("document.getElementById('status-text').textContent === 'Locked'")
            assert "needs a key" in seen(page, "getElementById('banner').textContent")
            page.evaluate("document.getElementById('key-button').click()")
            page.evaluate(f"document.getElementById('key-input').value = '{key}'")
            page.press("Enter")
            page.wait(LIVE)
            assert seen(page, "getElementById('key-input').value") == ""
            assert (seen(page, "cookie"), page.evaluate("localStorage.length")) == ("", 0)
