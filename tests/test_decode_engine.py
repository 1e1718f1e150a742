"""The engine: many threads ask, one generates; no reader waits for ever, and no text mixes versions."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
import torch

from attractor.config import APNConfig, GPTConfig
from attractor.generate import generate
from attractor.model import GPT
from attractor.serve.decode.engine import Engine, Job, Pin
from attractor.serve.decode.sequences import Publication
from attractor.serve.errors import Busy

VOCABULARY, CONTEXT, PATIENCE = 11, 32, 300.0


def model_of(seed, cls=GPT):
    torch.manual_seed(seed)
    config = GPTConfig(
        vocab_size=VOCABULARY,
        context=CONTEXT,
        num_layers=1,
        num_heads=1,
        dim=8,
        ffn="apn",
        apn=APNConfig(num_patches=4, top_k=2, rank=2),
    )
    model = cls(config).double()
    with torch.no_grad():
        model.embedding.weight.mul_(25.0)
    return model


class Gated(GPT):
    """Reads only while its gate is open: tests decide when the engine goes on."""

    gate = None

    def forward(self, tokens, *, cache=None, return_stats=False):
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)
        return super().forward(tokens, cache=cache)


BASE = model_of(0)
PUBLICATION = Publication(1, {"base": BASE, "x": model_of(1)}, window=20, pause=1.0)


def alone(job, publication=PUBLICATION):
    model = publication.guard if job.path is None else publication.paths[job.path]
    options = {name: getattr(job, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")}
    return [int(token) for token in generate(model, torch.tensor([list(job.prompt)]), **options)]


def tokens_of(stream):
    found = []
    while (written := stream.next(PATIENCE)) is not None:
        found.append(written.token)
    return found


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def some_jobs(count, tokens=12):
    return [
        Job(
            prompt=[(number + k) % VOCABULARY for k in range(1 + number % 7)],
            max_tokens=1 + number % tokens,
            temperature=(0.0, 0.8, 1.2)[number % 3],
            top_k=(None, 4)[number % 2],
            seed=number,
            path=(None, None, "x")[number % 3],
        )
        for number in range(count)
    ]


@pytest.fixture
def gate():
    opened = threading.Event()
    yield opened
    opened.set()


@pytest.fixture
def gated(gate):
    model = model_of(0, Gated)
    model.gate = gate
    return Publication(1, {"base": model})


def test_what_is_written_is_what_generate_writes():
    with Engine(PUBLICATION, max_rows=6) as engine:
        jobs = some_jobs(20, tokens=40)
        streams = [engine.submit(job) for job in jobs]
        for job, stream in zip(jobs, streams, strict=True):
            assert tokens_of(stream) == alone(job)
            assert (stream.finish, stream.version, stream.message) == ("length", 1, None)
        assert streams[0].next(0) is None  # again and again


def test_written_says_who_wrote():
    with Engine(PUBLICATION) as engine:
        for written in engine.submit(Job([1, 2, 3], max_tokens=8, seed=0)):
            assert list(written.shares) == ["base", "x"]
            assert sum(written.shares.values()) == pytest.approx(1)
            assert written.logprob <= 0
        for written in engine.submit(Job([1, 2, 3], max_tokens=2, path="x")):
            assert written.shares == {"x": 1.0}
        recent = engine.stats()["recent"]
        assert [(one["version"], one["tokens"], one["finish"]) for one in recent] == [
            (1, 8, "length"),
            (1, 2, "length"),
        ]
        assert set(recent[0]["posterior"]) == {"base", "x"}


@pytest.mark.parametrize("numbers", [{"temperature": 1e-40}, {"temperature": 1e-30}, {"top_p": 1e-320}])
def test_numbers_that_underflow_choose_the_likeliest_token(numbers):
    with Engine(PUBLICATION) as engine:
        stream = engine.submit(Job([3, 4], max_tokens=20, **numbers))
        assert tokens_of(stream) == alone(Job([3, 4], max_tokens=20, temperature=0.0))
        assert stream.finish == "length"


def test_stop_tokens_end_a_text_and_are_not_handed_out():
    job = Job([3, 4], max_tokens=30, temperature=1.0, seed=5)
    wanted = alone(job)
    stop = wanted[10]
    with Engine(PUBLICATION) as engine:
        stream = engine.submit(
            Job([3, 4], max_tokens=30, temperature=1.0, seed=5, stop_tokens=frozenset({stop}))
        )
        assert tokens_of(stream) == wanted[: wanted.index(stop)]
        assert stream.finish == "stop"


def test_many_threads_at_once():
    jobs, wrong = some_jobs(48), []

    def client(mine):
        for job in mine:
            while True:
                try:
                    stream = engine.submit(job)
                    break
                except Busy as busy:
                    time.sleep(busy.retry_after / 100)
            if tokens_of(stream) != alone(job):
                wrong.append(job)

    with Engine(PUBLICATION, max_rows=5, max_waiting=4) as engine:
        threads = [threading.Thread(target=client, args=(jobs[start::8],)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not wrong
        until(lambda: engine.stats()["rows"] == engine.stats()["waiting"] == 0)
        assert engine.stats()["tokens_per_second"] > 0


def test_tokens_per_second_are_those_of_the_last_seconds(monkeypatch):
    monkeypatch.setattr("attractor.serve.decode.engine.RECENT_S", 0.2)
    with Engine(PUBLICATION) as engine:
        job = Job(prompt=[1, 2], max_tokens=8)
        assert len(tokens_of(engine.submit(job))) == 8
        until(lambda: engine.stats()["tokens_per_second"] == 0)  # they are too long ago
        tokens_of(engine.submit(job))
        until(lambda: engine.stats()["rows"] == 0)
        assert sum(tokens for _, tokens in engine._tokens) <= 8  # nor is a long past kept


def test_a_job_keeps_the_version_it_began_with():
    """Every version is another model, and every text is that of the version on its stream."""
    versions = {number: Publication(number, {"base": BASE, "x": model_of(number)}) for number in range(1, 5)}
    with Engine(versions[1], max_rows=8) as engine:
        jobs, streams = some_jobs(24), []
        for number, job in enumerate(jobs):
            streams.append(engine.submit(job))
            if number % 6 == 5:
                until(lambda: streams[-1].version is not None)
                engine.publish(versions[min(2 + number // 6, 4)])
        for job, stream in zip(jobs, streams, strict=True):
            assert tokens_of(stream) == alone(job, versions[stream.version])
        assert [stream.version for stream in streams[5::6]] == [1, 2, 3, 4]


def test_jobs_of_one_request_have_one_version():
    versions = [Publication(number, {"base": BASE, "x": model_of(number)}) for number in (1, 2)]
    with Engine(versions[0], max_rows=1) as engine:
        pin = Pin()
        streams = [engine.submit(Job(prompt=[1, 2], max_tokens=5), pin) for _ in range(4)]
        until(lambda: streams[0].version is not None)
        engine.publish(versions[1])
        later = engine.submit(Job(prompt=[1, 2], max_tokens=5))
        for stream in [*streams, later]:
            tokens_of(stream)
        assert [stream.version for stream in streams] == [1] * 4
        assert later.version == 2


def test_a_publication_is_let_go_with_its_last_job(gate):
    model = model_of(0, Gated)
    model.gate = gate
    old = Publication(1, {"base": model})
    watch, model_watch = weakref.ref(old), weakref.ref(model)
    with Engine(old) as engine:
        streams = [engine.submit(Job([1], max_tokens=5)) for _ in range(3)]
        until(lambda: streams[0].version == 1)
        del old, model
        engine.publish(PUBLICATION)
        gc.collect()
        assert watch() is not None
        gate.set()
        for stream in streams:
            tokens_of(stream)
        assert streams[0].version == 1
        until(lambda: watch() is None and model_watch() is None)
        assert tokens_of(engine.submit(Job([1], max_tokens=2)))


def test_cancelling(gated, gate):
    with Engine(gated, max_rows=1, max_waiting=2) as engine:
        first = engine.submit(Job([1], max_tokens=10**6))
        until(lambda: first.version is not None)
        second, third = (engine.submit(Job([2], max_tokens=3)) for _ in range(2))
        with pytest.raises(Busy, match="2 jobs wait"):
            engine.submit(Job([1]))
        second.cancel()
        gate.set()
        assert first.next(PATIENCE) is not None
        assert tokens_of(second) == []
        assert second.finish == "cancelled"
        assert second.version is None
        first.cancel()
        tokens_of(first)
        assert first.finish == "cancelled"
        assert len(tokens_of(third)) == 3
        third.cancel()  # too late
        assert third.finish == "length"


def test_a_stream_without_a_reader_is_cancelled():
    with Engine(PUBLICATION) as engine:
        stream = engine.submit(Job([1], max_tokens=10**6))
        for _ in stream:
            break
        assert engine.stats()["rows"] <= 1
        assert stream.next(PATIENCE) is not None  # to leave a loop is not to drop it
        del stream, _
        gc.collect()
        until(lambda: engine.stats()["rows"] == 0 and engine.stats()["recent"])
        assert engine.stats()["recent"][-1]["finish"] == "cancelled"


def test_a_reader_that_does_not_read_holds_up_no_other():
    with Engine(PUBLICATION) as engine:
        idle, quick = engine.submit(Job([1], max_tokens=300, seed=0)), engine.submit(Job([2], max_tokens=20))
        assert len(tokens_of(quick)) == 20
        until(lambda: idle.finish == "length")
        assert tokens_of(idle) == alone(Job([1], max_tokens=300, seed=0))


def test_coroutines():
    jobs = some_jobs(12)

    async def read(engine, job):
        return [written.token async for written in engine.submit(job)]

    async def drain(stream):
        async for _ in stream:
            pass

    async def everything(engine):
        stream = engine.submit(Job([1], max_tokens=10**6))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(drain(stream), 0.05)
        stream.cancel()
        await drain(stream)
        assert stream.finish == "cancelled"
        return await asyncio.gather(*(read(engine, job) for job in jobs))

    with Engine(PUBLICATION) as engine:
        assert asyncio.run(everything(engine)) == [alone(job) for job in jobs]


def test_a_loop_that_closed_ends_its_jobs(gated, gate):
    """Its reader will never read again."""
    with Engine(gated) as engine:
        stream, loop = engine.submit(Job([1], max_tokens=10**6)), asyncio.new_event_loop()
        loop.close()
        stream._buffer.sleepers.append((loop, asyncio.Event()))
        gate.set()
        tokens_of(stream)
        assert stream.finish == "cancelled"


def test_rows_are_read_in_one_pass(gated, gate):
    """Sixteen texts cost little more passes than one of them, plus one for each prompt."""
    passes, model = [], gated.paths["base"]
    model.register_forward_hook(lambda *_: passes.append(1))
    with Engine(gated) as engine:
        streams = [engine.submit(Job([1, 2], max_tokens=20)) for _ in range(16)]
        gate.set()
        assert [len(tokens_of(stream)) for stream in streams] == [20] * 16
    assert 16 + 20 <= len(passes) <= 16 + 16 + 20


def test_closing():
    engine = Engine(PUBLICATION)
    short, endless = engine.submit(Job([1], max_tokens=5)), engine.submit(Job([1], max_tokens=10**7))
    assert endless.next(PATIENCE) is not None
    threads = [threading.Thread(target=engine.close, args=(drain,)) for drain in (PATIENCE, 0.05)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert len(tokens_of(short)) == 5
    tokens_of(endless)
    assert (endless.finish, endless.message) == ("cancelled", "the engine has ended")
    assert not engine.is_alive
    with pytest.raises(Busy, match="closing"):
        engine.submit(Job([1]))
    engine.close()


def test_closing_lets_those_who_wait_finish():
    engine = Engine(PUBLICATION, max_rows=1)
    streams = [engine.submit(job) for job in some_jobs(6)]
    engine.close(PATIENCE)
    assert [stream.finish for stream in streams] == ["length"] * 6


class Moody(GPT):
    """Cannot read the token 7."""

    def forward(self, tokens, *, cache=None, return_stats=False):
        if bool((tokens == 7).any()):
            raise RuntimeError("not that one")
        return super().forward(tokens, cache=cache)


def test_failures_stay_where_they_happen():
    moody = Publication(1, {"base": BASE, "moody": model_of(3, Moody)})
    with Engine(moody) as engine:
        good = engine.submit(Job([1], max_tokens=100, path="base", seed=0))
        bad = engine.submit(Job([1, 7], max_tokens=100))
        assert tokens_of(bad) == []
        assert (bad.finish, bad.message) == ("error", "RuntimeError: not that one")
        later = engine.submit(Job([1], max_tokens=10**5, temperature=1.0, path="moody"))
        assert 7 not in tokens_of(later)[:-1]  # it wrote one, and could not read it
        assert later.finish == "error"
        assert tokens_of(good) == alone(Job([1], max_tokens=100, path="base", seed=0), moody)


def test_a_step_that_fails_as_a_whole_ends_its_rows(monkeypatch):
    with Engine(PUBLICATION) as engine:
        stream = engine.submit(Job([1], max_tokens=10**6))
        assert stream.next(PATIENCE) is not None

        def fail(*_):
            monkeypatch.undo()
            raise MemoryError("full")

        monkeypatch.setattr(engine._batch, "_write", fail)
        tokens_of(stream)
        assert (stream.finish, stream.message) == ("error", "MemoryError: full")
        assert tokens_of(engine.submit(Job([1], max_tokens=3, seed=0))) == alone(
            Job([1], max_tokens=3, seed=0)
        )


def test_a_path_that_is_gone_when_the_job_starts(gated, gate):
    with Engine(Publication(1, {**gated.paths, "x": BASE}), max_rows=1) as engine:
        first = engine.submit(Job([1], max_tokens=1))
        until(lambda: first.version == 1)
        second = engine.submit(Job([1], path="x"))
        engine.publish(Publication(2, {"base": BASE}))
        gate.set()
        assert tokens_of(second) == []
        assert (second.finish, second.message) == ("error", "the path 'x' was dropped")


def test_an_idle_engine_sleeps():
    with Engine(PUBLICATION) as engine:
        turns, turn = [], engine._turn
        engine._turn = lambda: (turns.append(1), turn())
        tokens_of(engine.submit(Job([1], max_tokens=2)))
        until(lambda: engine.stats()["rows"] == 0)
        assert len(turns) == 2
        time.sleep(0.05)
        assert len(turns) == 2
        tokens_of(engine.submit(Job([1], max_tokens=2)))
        assert len(turns) == 4


def test_mistakes():
    for wrong, message in (
        ({"prompt": []}, "empty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": 2**64}, "seed"),
    ):
        with pytest.raises(ValueError, match=message):
            Job(**{"prompt": [1], **wrong})
    with Engine(PUBLICATION) as engine:
        for wrong, message in (
            ({"path": "y"}, "no path 'y'"),
            ({"prompt": [VOCABULARY]}, "token 11"),
            ({"prompt": [-1]}, "token -1"),
            ({"prompt": ["a"]}, "token 'a'"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(Job(**{"prompt": [1], **wrong}))
        small = GPT(GPTConfig(vocab_size=7, context=CONTEXT, num_layers=1, num_heads=1, dim=8))
        with pytest.raises(ValueError, match="start another engine"):
            engine.publish(Publication(2, {"base": small}))
