"""A key opens what its scopes say; bodies that are too large, slow or malformed change nothing."""

import asyncio
import hashlib
import json
import logging
import socket

import pytest
import schemathesis
from fake_service import FakeService
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from serving import Running
from starlette.testclient import TestClient

from attractor.serve.config import ServeSettings, is_loopback
from attractor.serve.http import app as app_module
from attractor.serve.http.app import create_app
from attractor.serve.http.auth import SCOPES, Key, KeyRing, add_key, declared, local_problem, needs, new_key
from attractor.serve.http.middleware import json_problem

SCOPES_OF = {
    ("GET", "/health"): "open",
    ("GET", "/"): "open",
    ("GET", "/dashboard/{name}"): "open",
    ("GET", "/openapi.json"): "generate learn monitor admin",
    ("GET", "/v1/models"): "generate",
    ("GET", "/v1/models/{model:path}"): "generate",
    ("POST", "/v1/completions"): "generate",
    ("POST", "/v1/chat/completions"): "generate",
    ("POST", "/v1/learn"): "learn",
    ("POST", "/v1/rollback"): "admin",
    ("DELETE", "/v1/sources/{source}"): "admin",
    ("GET", "/v1/versions"): "monitor learn admin",
    ("GET", "/v1/overlays"): "monitor learn admin",
    ("GET", "/v1/monitor"): "monitor learn admin",
    ("GET", "/metrics"): "monitor learn admin",
    ("GET", "/ready"): "monitor learn admin",
}
BODIES = {
    "/v1/completions": {"model": "fake", "prompt": "A"},
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "A"}]},
    "/v1/learn": {"text": "x", "source": "kjv"},
    "/v1/rollback": {"version": 0},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, {scope: add_key(path, [scope]) for scope in SCOPES}


def client_of(service, **options):
    return TestClient(create_app(service, ServeSettings(**options)), base_url="http://127.0.0.1")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def ask(client, method, path, headers):
    place = path.replace("{name}", "dashboard.css").replace("{model:path}", "fake").replace("{source}", "kjv")
    return client.request(method, place, json=BODIES.get(path), headers=headers)


# --- scopes


def test_every_route_declares_its_scopes():
    app = create_app(FakeService(), ServeSettings())
    found = {}
    for route in app.routes:
        scopes = declared(route)
        assert scopes is not None, route
        for method in route.methods:
            found[method, route.path] = scopes
    expected = {key: frozenset(() if text == "open" else text.split()) for key, text in SCOPES_OF.items()}
    assert found == expected


def test_an_app_with_an_undeclared_route_does_not_start(monkeypatch):
    def careless(app: FastAPI) -> None:
        app.add_api_route("/backdoor", lambda: "in")

    monkeypatch.setattr(app_module, "add_dashboard", careless)
    with pytest.raises(AssertionError, match="/backdoor"):
        create_app(FakeService(), ServeSettings())


def test_a_route_that_appears_later_is_closed(service, keys):
    app = create_app(service, ServeSettings(keys=keys[0]))
    app.add_api_route("/backdoor", lambda: "in")
    client = TestClient(app)
    assert client.get("/backdoor").status_code == 401
    assert {client.get("/backdoor", headers=bearer(key)).status_code for key in keys[1].values()} == {403}


@pytest.mark.parametrize("method_and_path", SCOPES_OF, ids=" ".join)
def test_only_the_declared_scopes_open_a_route(service, keys, method_and_path):
    service.learn(["text"], "kjv", None)
    scopes = SCOPES_OF[method_and_path]
    before = service.state(), len(service.jobs)
    client = client_of(service, keys=keys[0])
    wrong = {"Authorization": "Bearer apn-wrong"}
    for headers in ({}, wrong, {"Authorization": keys[1]["admin"]}, {"X-Api-Key": keys[1]["admin"]}):
        answer = ask(client, *method_and_path, headers)
        assert (answer.status_code == 401) == (scopes != "open")
        if scopes != "open":
            assert answer.json()["error"]["code"] == "invalid_api_key"
    for scope, key in keys[1].items():
        if scopes != "open" and scope not in scopes.split():
            assert ask(client, *method_and_path, bearer(key)).status_code == 403
    assert (service.state(), len(service.jobs)) == before
    for scope, key in keys[1].items():
        if scopes == "open" or scope in scopes.split():
            assert ask(client, *method_and_path, bearer(key)).status_code == 200
            service.learn(["text"], "kjv", None)


def test_unknown_places_and_methods(service, keys):
    client = client_of(service, keys=keys[0])
    assert client.get("/nothing").status_code == 404
    assert client.get("/v1/learn").status_code == 401
    assert client.get("/v1/learn", headers=bearer(keys[1]["learn"])).status_code == 405
    assert client.get("/dashboard/..%2fapp.py").status_code == 404
    assert client.get("/dashboard/app.py").status_code == 404


# --- keys


def test_keys_are_kept_as_hashes(tmp_path):
    path = tmp_path / "keys.json"
    first, second = add_key(path, ["generate", "learn"], "importer"), add_key(path, ["admin"])
    assert first not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    ring = KeyRing.load(path)
    assert ring.find(f"Bearer {first}").scopes == {"generate", "learn"}
    assert ring.find(f"bearer {second}").scopes == {"admin"}
    assert ring.keys[0].sha256 == hashlib.sha256(first.encode()).hexdigest()
    for wrong in (None, "", first, f"Basic {first}", f"Bearer {first}x", "Bearer ", "Bearer \ud800"):
        assert ring.find(wrong) is None


def test_every_key_is_compared_whatever_matches(monkeypatch):
    entries = [new_key(["learn"]) for _ in range(5)]
    ring = KeyRing([key_of(entry) for _, entry in entries])
    seen = []

    def compare(a, b):
        seen.append((a, b))
        return a == b

    monkeypatch.setattr("attractor.serve.http.auth.hmac.compare_digest", compare)
    assert ring.find(f"Bearer {entries[0][0]}").id == entries[0][1]["id"]
    assert len(seen) == 5


def key_of(entry):
    return Key(entry["id"], entry["sha256"], frozenset(entry["scopes"]))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"schema_version": 2, "keys": []}',
        '{"schema_version": 1, "keys": {}}',
        '{"schema_version": 1, "keys": [{"id": "a", "sha256": "zz", "scopes": ["learn"]}]}',
        json.dumps({"schema_version": 1, "keys": [{"id": "a", "sha256": "0" * 64, "scopes": ["root"]}]}),
        json.dumps({"schema_version": 1, "keys": [{"id": "a", "sha256": "0" * 64, "scopes": []}]}),
        json.dumps({"schema_version": 1, "keys": [{"id": "a", "sha256": "0" * 64, "scopes": ["learn"]}] * 2}),
    ],
)
def test_a_damaged_file_of_keys_is_refused(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="cannot read keys from"):
        create_app(FakeService(), ServeSettings(keys=path))


def test_scopes_are_checked_where_they_are_typed():
    with pytest.raises(ValueError, match="scope"):
        new_key(["root"])
    with pytest.raises(ValueError, match="opens nothing"):
        new_key([])
    with pytest.raises(ValueError, match="open_to_all"):
        needs()


# --- without keys


def test_without_keys_only_loopback_may_be_bound(tmp_path):
    for host in ("0.0.0.0", "::", "192.168.0.5", "example.org", "localhost.example.org"):
        with pytest.raises(ValueError, match="there are no keys"):
            ServeSettings(host=host)
        ServeSettings(host=host, keys=tmp_path / "keys.json")
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"):
        assert is_loopback(host)


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "localhost:8000"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "127.0.0.1"}, True),
        (
            {"host": "localhost:8000", "origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
            True,
        ),
        ({}, False),
        ({"host": "evil.example"}, False),
        ({"host": "localhost.evil.example:8000"}, False),
        ({"host": "evil@localhost"}, False),
        ({"host": "[::1"}, False),
        ({"host": "localhost:8000", "origin": "https://evil.example"}, False),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, False),
        ({"host": "localhost:8000", "origin": "null"}, False),
        ({"host": "localhost:8000", "sec-fetch-site": "cross-site"}, False),
    ],
)
def test_pages_from_elsewhere_are_not_this_machines_user(headers, allowed):
    assert (local_problem("POST", headers) is None) == allowed


def test_a_page_from_elsewhere_changes_nothing(service):
    client = client_of(service)
    lesson = BODIES["/v1/learn"]
    for headers in (
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert client.post("/v1/learn", json=lesson, headers=headers).status_code == 403
    assert client.get("/v1/monitor", headers={"Host": "evil.example"}).status_code == 403
    plain = client.post("/v1/learn", content=json.dumps(lesson), headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415
    assert service.version == 0


# --- limits


def test_large_bodies_are_refused_whole_or_in_pieces(service):
    client = client_of(service, max_body=1000)
    kind = {"Content-Type": "application/json"}
    large = json.dumps({"text": "x" * 1000, "source": "kjv"}).encode()
    assert client.post("/v1/learn", content=large, headers=kind).status_code == 413
    assert client.post("/v1/learn", content=iter([large[:600], large[600:]]), headers=kind).status_code == 413
    assert client.post("/v1/learn", json={"text": "x" * 900, "source": "kjv"}).status_code == 200
    assert service.version == 1


def raw(port, *parts, stay=True):
    """What a server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        for part in parts:
            connection.sendall(part)
        if not stay:
            return b""
        received = b""
        while more := connection.recv(65536):
            received += more
            if b"\r\n\r\n" in received:
                break
        return received


def test_slow_endless_and_odd_requests_over_a_socket(service):
    hasty = ServeSettings(body_timeout=0.3, max_body=100_000)
    options = ServeSettings(body_timeout=600, max_body=100_000)
    head = b"POST /v1/learn HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with Running(create_app(service, hasty), hasty) as running:
        assert b" 408 " in raw(running.port, head + b"Content-Length: 50\r\n\r\n", b'{"text": ')
    with Running(create_app(service, options), options) as running:
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        assert b" 413 " in raw(running.port, head + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk)
        assert b" 413 " in raw(running.port, head + b"Content-Length: 99999999999\r\n\r\n")
        assert b" 400 " in raw(running.port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 70_000)
        assert b" 400 " in raw(running.port, b"\x16\x03\x01\x02\x00\r\n\r\n")
        raw(running.port, head + b"Content-Length: 50\r\n\r\n", b'{"text": ', stay=False)
        assert b" 200 " in raw(running.port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert service.version == 0


def test_who_may_not_come_in_is_not_listened_to(service, keys):
    """The answer comes before the body."""
    options = ServeSettings(keys=keys[0], body_timeout=600)
    with Running(create_app(service, options), options) as running:
        head = b"POST /v1/learn HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        assert b" 401 " in raw(running.port, head + b"Content-Length: 999\r\n\r\n")


nested = st.recursive(
    st.none() | st.text('[]{}\\"a', max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


def depth(value):
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(nested, st.integers(1, 6))
def test_depth_of_json(value, limit):
    assert (json_problem(json.dumps(value).encode(), limit, 1000) is not None) == (depth(value) > limit)


def test_bodies_that_are_not_what_they_should_be(service):
    client = client_of(service)
    kind = {"Content-Type": "application/json"}
    start = b'{"source": "kjv", "text": '
    bodies = [b"", b"{", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b'"' * 100_001]
    bodies += [start + rest for rest in (b'"\\ud800"}', b"1" * 5000 + b"}", b"NaN}", b'"x"', b'"x"} {}')]
    for body in bodies:
        answer = client.post("/v1/learn", content=body, headers=kind)
        assert 400 <= answer.status_code < 500, body[:40]
        assert answer.json()["error"]["message"]
    assert service.version == 0


def test_errors_of_ours_say_nothing_of_the_inside(service, caplog):
    def broken(job, pin):
        raise KeyError("secret")

    service.submit = broken
    answer = client_of(service).post("/v1/completions", json=BODIES["/v1/completions"])
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "secret" in caplog.text  # the log of the server says it


def test_denied_requests_are_in_the_audit_log(service, keys, caplog):
    caplog.set_level(logging.INFO, "attractor.audit")
    client = client_of(service, keys=keys[0])
    client.get("/v1/monitor")
    client.post("/v1/rollback", json={"version": 0}, headers=bearer(keys[1]["learn"]))
    lines = [json.loads(record.message) for record in caplog.records]
    assert [(line["route"], line["outcome"]) for line in lines] == [
        ("GET /v1/monitor", 401),
        ("POST /v1/rollback", 403),
    ]
    assert lines[0]["key"] is None
    assert lines[1]["key"] == KeyRing.load(keys[0]).find(f"Bearer {keys[1]['learn']}").id
    assert not any(key in caplog.text for key in keys[1].values())


def test_websockets_are_turned_away(service):
    sent = []

    async def send(message):
        sent.append(message)

    app = create_app(service, ServeSettings())
    asyncio.run(app({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- whatever the description allows, and more

FUZZED = FakeService()
FUZZED_APP = create_app(FUZZED, ServeSettings())
SCHEMA = schemathesis.openapi.from_dict(FUZZED_APP.openapi())
SCHEMA.app = FUZZED_APP


def fuzzed(examples):
    return settings(
        max_examples=examples,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
        derandomize=True,
        database=None,
    )


@SCHEMA.parametrize()
@fuzzed(25)
def test_fuzzed_requests_never_break_it_and_refused_ones_change_nothing(case):
    before = FUZZED.state()
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "fake"  # chance would not find it
    answer = case.call(headers={"Host": "127.0.0.1"}, base_url="http://127.0.0.1")
    case.validate_response(answer, checks=[not_a_server_error])
    if answer.status_code >= 400:
        assert FUZZED.state() == before
        assert answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def locked(keys):
    service = FakeService()
    app = create_app(service, ServeSettings(keys=keys[0]))
    with TestClient(app, base_url="http://127.0.0.1") as client:  # one event loop for all requests
        yield service, client


@SCHEMA.parametrize()
@fuzzed(10)
def test_fuzzed_requests_without_a_key_get_nowhere(case, locked):
    service, client = locked
    arguments = case.as_transport_kwargs(base_url="http://127.0.0.1")
    fields = {
        name: arguments[name] for name in ("params", "json", "headers") if arguments.get(name) is not None
    }
    answer = client.request(arguments["method"], arguments["url"], **fields)
    assert answer.status_code in ((200, 405) if case.path == "/health" else (401, 404, 405))
    assert service.state() == FakeService().state()
    assert not service.jobs
