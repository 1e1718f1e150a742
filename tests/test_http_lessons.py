"""Lessons and figures of an app with a fake service."""

import json
import logging
import threading

import pytest
from fake_service import BUSY, REFUSED, UNAVAILABLE, FakeService, filled
from pydantic import TypeAdapter
from serving import until

from attractor.serve.http.status import Monitor


def completion(client, **fields):
    return client.post("/v1/completions", json={"model": "fake", "prompt": "A", **fields})


# --- learning


def test_a_lesson_and_back_again(client, service):
    lesson = {"text": "In the beginning", "source": "kjv", "idempotency_key": "a"}
    learned = client.post("/v1/learn", json=lesson)
    assert learned.status_code == 200
    assert learned.headers["X-Attractor-Version"] == "1"
    assert (learned.json()["version"], learned.json()["tokens"]) == (1, 16)
    again = client.post("/v1/learn", json=lesson).json()
    assert (again["version"], again["repeated"]) == (1, True)
    client.post("/v1/learn", json={"texts": ["a", "b"], "source": "news"})
    assert list(client.get("/v1/overlays").json()["overlays"]) == ["kjv", "news"]
    assert client.delete("/v1/sources/news?idempotency_key=d").json() == {"version": 3, "source": "news"}
    assert client.delete("/v1/sources/news").status_code == 404
    assert client.post("/v1/rollback", json={"version": 2}).json() == {"version": 4, "to": 2}
    assert service.sources == {"kjv": 16, "news": 2}
    assert client.post("/v1/rollback", json={"version": 99}).status_code == 422
    lines = client.get("/v1/versions?limit=2&before=4").json()["data"]
    assert [line["version"] for line in lines] == [3, 2]


def test_problems_of_a_lesson(client, service):
    def answer():
        return client.post("/v1/learn", json={"text": "x", "source": "kjv"})

    service.problem = BUSY
    assert (answer().status_code, answer().headers["retry-after"]) == (429, "3")
    service.problem = REFUSED
    assert answer().status_code == 409
    assert answer().json()["error"]["figures"] == {"canary": "news", "before": 4.6, "after": 5.2}
    assert answer().json()["error"]["at_fault"] == [2]
    service.problem = UNAVAILABLE
    assert answer().status_code == 503
    assert "/srv" not in answer().text
    service.problem = ValueError("no")
    assert answer().status_code == 422
    service.problem = RuntimeError("secret of /srv/data")
    assert answer().status_code == 500
    assert "secret" not in answer().text
    service.problem = None
    service.learning = False
    assert answer().json()["error"]["code"] == "not_learning"
    assert service.version == 0


def test_a_server_that_does_not_learn_says_so_to_whatever_would_change_it(client, service):
    service.learn(["x"], "kjv", None)
    service.learning = False
    replies = [
        client.post("/v1/learn", json={"text": "x", "source": "kjv"}),
        client.delete("/v1/sources/kjv"),
        client.post("/v1/rollback", json={"version": 0}),
    ]
    assert [reply.status_code for reply in replies] == [409] * 3
    assert len({reply.text for reply in replies}) == 1
    assert replies[0].json()["error"]["code"] == "not_learning"
    assert service.version == 1


@pytest.mark.parametrize(
    "form",
    [
        {"source": "kjv"},
        {"text": "x"},
        {"text": "x", "texts": ["y"], "source": "kjv"},
        [],
        None,
        {"text": "x", "source": "../../etc"},
        {"text": "x", "source": "a\n"},
        {"text": "x", "source": "base"},
        {"texts": ["x"] * 257, "source": "kjv"},
        {"text": "x", "source": "kjv", "idempotency_key": "a b"},
        {"texts": [], "source": "a"},
    ],
)
def test_lessons_that_make_no_sense(client, service, form):
    assert client.post("/v1/learn", json=form).status_code == 422
    assert service.version == 0


def test_lessons_hold_up_no_texts(client, service):
    service.held = threading.Event()
    answers = []
    lesson = {"text": "x", "source": "kjv"}
    learning = threading.Thread(
        target=lambda: answers.append(client.post("/v1/learn", json=lesson).status_code)
    )
    learning.start()
    until(lambda: service.learners == 1)
    assert completion(client).status_code == 200
    assert not answers
    service.held.set()
    learning.join()
    assert answers == [200]


# --- looking


def test_figures(client, service):
    service.learn(["x"], "kjv", None)
    completion(client, max_tokens=7)
    monitor = client.get("/v1/monitor").json()
    TypeAdapter(Monitor).validate_python(monitor)
    text = client.get("/metrics").text
    assert "attractor_version 1.0" in text
    assert "attractor_shared 0.0\n" in text
    assert "attractor_behind 0.0\n" in text
    assert "attractor_written_tokens_total 7.0" in text
    assert 'attractor_requests_total{method="POST",route="/v1/completions",status="200"} 1.0' in text
    assert "kjv" not in text
    assert client.get("/health").json() == {"status": "alive"}
    assert client.get("/ready").status_code == 200
    service.is_ready = (False, "the journal in /srv/data is read-only")
    answer = client.get("/ready")
    assert (answer.status_code, "/srv" in answer.text) == (503, False)


def test_numbers_that_json_does_not_know_become_null(client, service):
    service.overlays = lambda: {"kjv": {"loss": float("nan"), "list": [float("inf"), 1]}}
    assert client.get("/v1/overlays").json()["overlays"] == {"kjv": {"loss": None, "list": [None, 1]}}


def test_the_fake_keeps_the_contract():
    TypeAdapter(Monitor).validate_python(filled().monitor())
    TypeAdapter(Monitor).validate_python(FakeService().monitor())


def test_the_audit_log_tells_who_did_what_and_never_the_text(client, caplog):
    caplog.set_level(logging.INFO, "attractor.audit")
    client.post("/v1/learn", json={"text": "top secret", "source": "kjv"})
    completion(client, prompt="top secret")
    client.get("/v1/versions")
    client.post("/v1/learn", json={"text": "top secret", "source": "/"})
    lines = [json.loads(record.message) for record in caplog.records if record.name == "attractor.audit"]
    assert [(line["route"], line["source"], line["version"], line["outcome"]) for line in lines] == [
        ("POST /v1/learn", "kjv", "1", 200),
        ("POST /v1/completions", None, "1", 200),
        ("POST /v1/learn", None, "1", 422),
    ]
    assert all(line["key"] == "local" and line["time"] for line in lines)
    assert "secret" not in caplog.text
