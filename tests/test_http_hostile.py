"""What hostile clients try: everything is refused at a bounded cost, and other clients are answered."""

import contextlib
import json
import logging
import resource
import select
import socket
import threading

import pytest
from pydantic import ValidationError
from served import FOX, serve
from serving import Running, until
from starlette.testclient import TestClient

from attractor.serve.config import ServeSettings
from attractor.serve.errors import KeyReused
from attractor.serve.http import middleware
from attractor.serve.http.app import LogRateLimit, create_app, most_connections
from attractor.serve.http.auth import add_key
from attractor.serve.http.middleware import RateLimit
from attractor.serve.http.schemas import ChatForm, CompletionForm, LearnForm
from attractor.serve.service import Limits

HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LEARN = b"POST /v1/learn HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
PATIENCE = 300.0


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def reply(connection):
    received = b""
    while b"\r\n\r\n" not in received and (more := connection.recv(65536)):
        received += more
    return received


def is_closed(connection):
    """Waits until the server has closed this connection."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


# --- bodies


@pytest.mark.parametrize(
    ("value", "count"),
    [(b"1", 2_000_000), (b"1.5", 1_000_000), (b'""', 500_000), (b"[]", 500_000), (b"1.5", 200_000)],
)
def test_bodies_with_too_many_values_are_refused_before_they_are_parsed(client, service, value, count):
    body = b'{"model": "fake", "prompt": [' + (value + b",") * count + b"null]}"
    assert len(body) <= ServeSettings.max_body
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "values; at most 131,072" in answer.json()["error"]["message"]
    assert not service.jobs


def test_a_text_with_many_commas_is_one_value(client):
    lesson = {"text": ',[{"' * 100_000, "source": "kjv"}
    assert client.post("/v1/learn", json=lesson).status_code == 200


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        (CompletionForm, {"prompt": [1.5] * 50_000}),
        (CompletionForm, {"prompt": [-1] * 50_000}),
        (CompletionForm, {"prompt": [[None] * 100] * 500}),
        (CompletionForm, {"prompt": ["\ud800"] * 50_000}),
        (CompletionForm, {"prompt": "a", "stop": [0] * 50_000}),
        (ChatForm, {"messages": [{}] * 1000}),
        (ChatForm, {"messages": [{"role": "user", "content": [{}] * 50_000}]}),
        (LearnForm, {"texts": [0] * 50_000, "source": "kjv"}),
        (LearnForm, {"text": "a", "source": "kjv", **{f"field{number}": 0 for number in range(50_000)}}),
    ],
)
def test_few_errors_are_collected_however_many_there_are(form, fields):
    with pytest.raises(ValidationError) as caught:
        form.model_validate({"model": "fake", **fields})
    assert caught.value.error_count() <= 12


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x" * 300_000}),
        ("/v1/completions", {"prompt": ["x" * 100_000] * 3, "truncate_prompt": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300_000}]}),
    ],
)
def test_texts_that_are_far_too_long_are_not_tokenized(client, service, path, fields, monkeypatch):
    """Tokenizing holds the interpreter for seconds."""
    monkeypatch.delattr(type(service.tokenizer), "encode")
    answer = client.post(path, json={"model": "fake", **fields})
    assert answer.status_code == 400
    assert "at most 262,144" in answer.json()["error"]["message"]


def test_others_are_answered_while_a_large_body_is_checked(service, monkeypatch):
    checking, answered = threading.Event(), threading.Event()

    def slow(*arguments):
        checking.set()
        assert answered.wait(PATIENCE)
        return "no"

    monkeypatch.setattr(middleware, "json_problem", slow)
    settings = ServeSettings()
    body = b'{"text": "' + b"x" * 100_000 + b'"}'
    with Running(create_app(service, settings), settings) as running, connect(running.port) as large:
        large.sendall(LEARN + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert checking.wait(PATIENCE)
        with connect(running.port) as other:
            other.sendall(HEALTH)
            assert b" 200 " in reply(other)
        answered.set()
        assert b" 400 " in reply(large)


# --- floods of lessons


def has_reply(client):
    return bool(select.select([client], [], [], 0)[0])


class Flood:
    """A service whose writer is held while lessons wait for it."""

    def __init__(self, service):
        self.held, self.taught = threading.Event(), []
        self.service, self.learn = service, service.teacher.learn
        service.teacher.learn = self

    def __call__(self, texts, source, *asked):
        self.taught.append(source)
        assert self.held.wait(PATIENCE)
        return self.learn(texts, source, *asked)


def lesson(source):
    body = json.dumps({"text": FOX, "source": source}).encode()
    return LEARN + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_flood_of_lessons_does_not_lock_out_the_way_back(tmp_path):
    """Too many are refused, those whose clients have disconnected are dropped, and a rollback goes first."""
    settings = ServeSettings()
    with (
        serve(tmp_path, limits=Limits(learning=4, drain=0.5)) as service,
        Running(create_app(service, settings), settings) as running,
        contextlib.ExitStack() as stack,
    ):
        service.learn([FOX], "kept")
        flood = Flood(service)
        clients = [stack.enter_context(connect(running.port)) for _ in range(40)]
        for number, client in enumerate(clients):
            client.sendall(lesson(f"flood{number}"))
        until(lambda: len(flood.taught) == 1 and service._calls.qsize() == 3)
        until(lambda: sum(map(has_reply, clients)) == 36)
        assert all(b" 429 " in client.recv(65536, socket.MSG_PEEK) for client in clients if has_reply(client))

        answers = []

        def take_back():
            with connect(running.port) as admin:
                body = b'{"version": 1}'
                head = LEARN.replace(b"/v1/learn", b"/v1/rollback")
                admin.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                answers.append(reply(admin))

        admin = threading.Thread(target=take_back)
        admin.start()
        until(lambda: service._calls.qsize() == 4)
        waiting = [call.done for call in service._calls.queue if call.kind == "learning"]
        running_now = clients[int(flood.taught[0].removeprefix("flood"))]
        patient = next(client for client in clients if client is not running_now and not has_reply(client))
        for client in clients:
            if client is not patient:
                client.close()
        until(lambda: sum(done.cancelled() for done in waiting) == 2)
        flood.held.set()
        admin.join()
        assert b" 200 " in answers[0]
        assert b" 200 " in reply(patient)
        assert len(flood.taught) == 2
        assert [line["kind"] for line in service.versions()] == ["lesson", "rollback", "lesson", "lesson"]


# --- connections


def is_healthy(port):
    with connect(port) as connection:
        connection.sendall(HEALTH)
        return b" 200 " in reply(connection)


def asked(port, request, status):
    """A connection with a reply; on a slow machine the server may have cut it before it was asked."""
    while True:
        connection = connect(port)
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
            if status in reply(connection):
                return connection
        connection.close()


def trickle(connection, start, more):
    """Send more and more for as long as the server listens."""
    connection.settimeout(0.01)
    with contextlib.suppress(ConnectionError):
        connection.sendall(start)
        while True:
            connection.sendall(more)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(65536):
                    return


def test_slow_and_idle_connections_are_closed(service, tmp_path):
    add_key(tmp_path / "keys.json", ["learn"])
    settings = ServeSettings(idle_timeout=0.2, body_timeout=0.2, keys=tmp_path / "keys.json")
    with Running(create_app(service, settings), settings) as running:
        with connect(running.port) as silent, connect(running.port) as half:
            with contextlib.suppress(ConnectionError):
                half.sendall(HEALTH[:-2])
            assert is_closed(silent)
            assert is_closed(half)
        with asked(running.port, HEALTH, b" 200 ") as idle:
            assert is_closed(idle)
        with connect(running.port) as head:
            trickle(head, HEALTH[:-2] + b"X: ", b"x")
        refused = LEARN + b"Content-Length: 1000000\r\n\r\n"  # the key is missing, and the body is not read
        with asked(running.port, refused, b" 401 ") as body:
            trickle(body, b"", b"x")
        until(lambda: not running.server.server_state.connections)


def test_a_client_that_does_not_read_its_reply_is_cut_off(service):
    settings = ServeSettings()
    service.delay = PATIENCE
    form = b'{"model": "fake", "prompt": "a", "stream": true}'
    head = LEARN.replace(b"/v1/learn", b"/v1/completions")
    with Running(create_app(service, settings), settings) as running, connect(running.port) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(form) + form)
        until(lambda: service.tickets)
        (connection,) = running.server.server_state.connections
        connection.settings = ServeSettings(idle_timeout=0.01)
        connection.loop.call_soon_threadsafe(connection.pause_writing)
        assert is_closed(client)
        until(lambda: service.tickets[0].cancelled)


def test_slow_connections_make_room_for_others(service):
    settings = ServeSettings(max_connections=4)
    with Running(create_app(service, settings), settings) as running, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(running.port)) for _ in range(20)]
        for connection in slow:
            with contextlib.suppress(ConnectionError):
                connection.sendall(HEALTH[:-2])
        until(lambda: len(running.server.server_state.connections) <= 4)
        until(lambda: is_healthy(running.port))
        assert sum(has_reply(connection) and is_closed(connection) for connection in slow) >= 17


def test_where_all_connections_are_busy_a_new_one_is_refused(service):
    settings = ServeSettings(max_connections=2)
    service.delay = PATIENCE
    form = b'{"model": "fake", "prompt": "a"}'
    head = LEARN.replace(b"/v1/learn", b"/v1/completions")
    with Running(create_app(service, settings), settings) as running, contextlib.ExitStack() as stack:
        for _ in range(2):
            busy = stack.enter_context(connect(running.port))
            busy.sendall(head + b"Content-Length: %d\r\n\r\n" % len(form) + form)
        until(lambda: len(service.tickets) == 2)
        with connect(running.port) as other:
            assert b" 503 " in reply(other)
            assert is_closed(other)
        assert not any(ticket.cancelled for ticket in service.tickets)


def test_connections_leave_files_for_the_rest_of_the_server(monkeypatch):
    for files, most in ((100, 25), (600, 344), (4096, 512), (resource.RLIM_INFINITY, 512)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        assert most_connections(ServeSettings()) == most


def test_logs_grow_at_a_bounded_rate(caplog):
    now = [0.0]
    logger = logging.getLogger("test_http_hostile")
    limit = LogRateLimit(lambda: RateLimit(burst=3, seconds=10.0, clock=lambda: now[0]))
    logger.addFilter(limit)
    try:
        for number in range(1000):
            logger.warning("accepting %d failed", number)
        logger.warning("another line of code")
        now[0] = 10.0
        for number in range(2):
            logger.info("information is not limited")
            logger.warning("late %d", number)
    finally:
        logger.removeFilter(limit)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[:4] == [f"accepting {number} failed" for number in range(3)] + ["another line of code"]
    assert warnings[4:] == ["late 0", "late 1"]


def test_a_log_says_how_much_was_left_out():
    now = [0.0]
    limit = RateLimit(burst=2, seconds=10.0, clock=lambda: now[0])
    assert [limit.take() for _ in range(5)] == [0, 0, None, None, None]
    now[0] = 9.0
    assert limit.take() is None
    now[0] = 10.0
    assert [limit.take(), limit.take()] == [4, None]


def test_a_running_server_limits_its_logs(service, caplog, monkeypatch):
    settings, logger = ServeSettings(), logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "filters", [])  # other tests may have used up the limit
    with Running(create_app(service, settings), settings) as running:
        logger.addHandler(caplog.handler)  # uvicorn's records go to no other logger
        try:
            for _ in range(60):
                with connect(running.port) as connection:
                    connection.sendall(b"\x16\x03\x01\x02\x00\r\n\r\n")
                    assert b" 400 " in reply(connection)
        finally:
            logger.removeHandler(caplog.handler)
    assert 0 < len([record for record in caplog.records if "Invalid HTTP" in record.message]) < 40


def test_audit_lines_of_strangers_are_limited(service, tmp_path, caplog):
    caplog.set_level(logging.INFO, "attractor.audit")
    key = add_key(tmp_path / "keys.json", ["learn"])
    settings = ServeSettings(keys=tmp_path / "keys.json")
    with TestClient(create_app(service, settings)) as client:
        for _ in range(300):
            assert client.get("/v1/monitor").status_code == 401
        strangers = len(caplog.records)
        assert 100 <= strangers < 300
        for _ in range(3):
            assert client.post("/v1/rollback", headers={"Authorization": f"Bearer {key}"}).status_code == 403
    assert len(caplog.records) == strangers + 3


# --- keys of lessons


def test_a_key_that_came_with_something_else_is_refused(client, service):
    service.problem = KeyReused("the key 'a' came with another lesson before: take a new one")
    answer = client.post("/v1/learn", json={"text": "x", "source": "kjv", "idempotency_key": "a"})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("idempotency_key_reused", "idempotency_key")
    assert "take a new one" in error["message"]


def test_idempotency_keys_belong_to_their_senders(service, tmp_path):
    path = tmp_path / "keys.json"
    first, second = (add_key(path, ["learn", "admin"]) for _ in range(2))
    with TestClient(create_app(service, ServeSettings(keys=path))) as client:

        def learn(key):
            body = {"text": "x", "source": "kjv", "idempotency_key": "same"}
            return client.post("/v1/learn", json=body, headers={"Authorization": f"Bearer {key}"}).json()

        assert [learn(key)["version"] for key in (first, second, first)] == [1, 2, 1]
    with TestClient(create_app(service, ServeSettings()), base_url="http://127.0.0.1") as client:
        body = {"text": "x", "source": "kjv", "idempotency_key": "same"}
        assert client.post("/v1/learn", json=body).json()["version"] == 3
    assert "local:same" in service.answers
    assert not any(key in str(service.answers) for key in (first, second))


# --- odd requests


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-40},
        {"temperature": 5e-324},
        {"temperature": 1e-30},
        {"top_p": 1e-320},
        {"top_p": 1e-300, "temperature": 1e-300},
        {"top_p": 1e-8, "top_k": 1},
    ],
)
def test_numbers_that_underflow_choose_the_likeliest_token(tmp_path, fields):
    with (
        serve(tmp_path) as service,
        TestClient(create_app(service, ServeSettings()), base_url="http://127.0.0.1") as client,
    ):
        form = {"model": service.name, "prompt": "the ", "max_tokens": 6}
        likeliest = client.post("/v1/completions", json={**form, "temperature": 0}).json()["choices"]
        answer = client.post("/v1/completions", json={**form, **fields})
        assert answer.status_code == 200
        assert answer.json()["choices"] == likeliest


@pytest.mark.parametrize(
    ("target", "status"),
    [("POST /nope", 404), ("POST /health", 405), ("DELETE /", 405), ("POST /v1/learn", 401)],
)
def test_without_a_key_no_body_is_read(service, tmp_path, target, status):
    add_key(tmp_path / "keys.json", ["learn"])
    settings = ServeSettings(keys=tmp_path / "keys.json", body_timeout=PATIENCE)
    head = target.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
    with Running(create_app(service, settings), settings) as running, connect(running.port) as connection:
        connection.sendall(head)
        answer = reply(connection)
    assert b" %d " % status in answer
    assert b"x-attractor-version" not in answer.lower()


def test_only_clients_with_a_key_see_the_version(service, tmp_path):
    key = add_key(tmp_path / "keys.json", ["monitor"])
    with TestClient(create_app(service, ServeSettings(keys=tmp_path / "keys.json"))) as client:
        for path, status in (("/v1/monitor", 401), ("/health", 200), ("/nope", 404)):
            stranger = client.get(path)
            assert (stranger.status_code, "X-Attractor-Version" in stranger.headers) == (status, False)
        known = client.get("/v1/monitor", headers={"Authorization": f"Bearer {key}"})
        assert known.headers["X-Attractor-Version"] == "0"


def test_two_lengths_of_a_body_are_refused(service):
    settings = ServeSettings()
    body = b'{"text": "x", "source": "smuggled"}'
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with Running(create_app(service, settings), settings) as running, connect(running.port) as connection:
        connection.sendall(LEARN + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        assert b" 400 " in reply(connection)
        assert is_closed(connection)
    assert service.version == 0
