"""A retrofitted Hugging Face model behind the same server."""

from pathlib import Path
from typing import cast

import pytest
import torch
from served import FOX, LAW, hashes

from attractor.config import APNConfig
from attractor.continual.config import GuardConfig, LearnConfig, UpdateConfig
from attractor.continual.guarded import GuardedLearner
from attractor.model import GPT
from attractor.serve.decode.engine import Job
from attractor.serve.learning.canaries import Rules
from attractor.serve.service import Limits, Service
from attractor.tokenizer import ByteTokenizer

transformers = pytest.importorskip("transformers")


def serve(folder: Path) -> Service:
    from attractor import retrofit
    from attractor.hf import CausalLM

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    net = retrofit(transformers.LlamaForCausalLM(shape).eval(), APNConfig(num_patches=8, top_k=2, rank=4))
    learn = LearnConfig(update=UpdateConfig(learning_rate=1e-2), max_patches=3)
    learner = GuardedLearner(cast(GPT, CausalLM(net, context=32)), ByteTokenizer(), GuardConfig(learn=learn))
    return Service.open(learner, folder, rules=Rules(canary_tokens=32), limits=Limits(drain=0.5))


def text_of(service: Service, path: str | None = None) -> list[int]:
    job = Job(prompt=list(b"the "), max_tokens=40, temperature=0, path=path)
    return [written.token for written in service.submit(job)]


def test_it_learns_keeps_its_version_and_goes_back(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        alone = text_of(service)
        before = {name: p.clone() for name, p in service.teacher.learner.base.state_dict().items()}
        losses = [service.learn([FOX * 2], "fox")["loss"] for _ in range(8)]
        service.learn([LAW], "law")
        assert losses[-1] < losses[0]
        ticket = service.submit(Job(prompt=list(b"the "), max_tokens=30, seed=1))
        first = next(iter(ticket))
        service.learn([FOX], "fox")
        assert len([first, *ticket]) == 30
        assert ticket.version == 9
        assert text_of(service, path="base") == alone
        after = service.teacher.learner.base.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        kept = hashes(service)
    with serve(tmp_path) as service:
        assert service.version == 10
        assert hashes(service) == kept
        service.rollback(0)
        assert text_of(service) == alone
