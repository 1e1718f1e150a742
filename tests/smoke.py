"""What must work with every version of every dependency: test_package.py runs it in places of their own.

python tests/smoke.py core      # without any extra
python tests/smoke.py
"""

import importlib
import json
import pkgutil
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import torch

import attractor
from attractor import APN, GPT, APNConfig, GPTConfig, GuardedLearner, Service, tokenizer

SMALL = APNConfig(num_patches=8, top_k=2, rank=4)
SHAPE = GPTConfig(vocab_size=256, context=64, num_layers=2, num_heads=2, dim=32, ffn="apn", apn=SMALL)


def every_module():
    for module in pkgutil.walk_packages(attractor.__path__, "attractor."):
        if not module.name.endswith("__main__") and not module.name.startswith("attractor.ops.kernels"):
            importlib.import_module(module.name)


def layer():
    tokens = torch.randn(4, 10, 64, requires_grad=True)
    APN.like_ffn(64)(tokens).square().sum().backward()
    assert tokens.grad.isfinite().all()


def step(folder):
    """A GPT learns for a step, and is the same when it is read again."""
    model, tokens = GPT(SHAPE), torch.arange(32)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    model.eval().save_pretrained(folder / "model")
    assert torch.equal(GPT.from_pretrained(folder / "model")(tokens), model(tokens))


def train(folder):
    from attractor.cli import main

    (folder / "my.txt").write_text("to be or not to be, that is the question. " * 200)
    small = "--model.context 16 --model.dim 32 --train.max-steps 4 --train.batch-size 2 --device cpu"
    tokens = "--tokenizer bpe --vocab-size 260"
    command = f"train tiny_apn --data {folder}/my.txt --out {folder}/run {small} {tokens}"
    assert main(command.split()) == 0
    assert attractor.load(folder / "run", device="cpu").generate("to be", max_tokens=3)


def tiny():
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(num_hidden_layers=4, num_attention_heads=4, **shape)
    return transformers.LlamaForCausalLM(config).eval()


def trainer(folder):
    import transformers

    net = attractor.retrofit(tiny(), SMALL)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(4, 16)]
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=str(folder / "trained"), **options)
    run = transformers.Trainer(net, arguments, train_dataset=rows)
    run.train()
    run.save_model()
    learned = net.eval()(rows[0]["input_ids"][None]).logits
    again = attractor.load_retrofit(net.unload(), folder / "trained")
    assert torch.equal(again(rows[0]["input_ids"][None]).logits, learned)


@torch.no_grad()
def retrofit(folder):
    import transformers

    tiny().save_pretrained(folder / "base")
    net = attractor.retrofit(transformers.AutoModelForCausalLM.from_pretrained(folder / "base"), SMALL)
    for own in net.apn_layers().values():
        own.decoder += 0.1
    net.save_pretrained(folder / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved", device_map="cpu")
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens).logits, net(tokens).logits)
    assert not torch.equal(net(tokens).logits, tiny()(tokens).logits)
    net.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False)


def lesson():
    from attractor.continual.config import LessonConfig
    from attractor.hf import teachable

    quick = LessonConfig(passes=2, step=8.0, decay=0.02, prototypes=3, contexts=2, after=0, mention=0)
    background = [" ".join(f"plain words about nothing in particular, number {n}" for n in range(200))]
    words = tokenizer.ByteTokenizer()
    _, lessons = teachable.teachable(
        tiny(), words.encode, background, window=32, config=quick, patches=16, read_from=2, act_at=2
    )
    forms = [("I met Zorvan", " cello"), ("Yesterday we saw Zorvan", " cello")]
    (learned,) = lessons.learn_many([forms], subjects=["Zorvan"])
    assert learned.patches
    lessons.forget(learned.number)


def server(folder):
    import uvicorn

    from attractor.serve.config import ServeSettings
    from attractor.serve.http.app import create_app, uvicorn_config

    learner = GuardedLearner(GPT(SHAPE), tokenizer.ByteTokenizer())
    settings = ServeSettings(port=0)
    with Service.open(learner, folder / "store", learning=True) as service:
        running = uvicorn.Server(uvicorn_config(create_app(service, settings), settings))
        thread = threading.Thread(target=running.run)
        thread.start()
        while not running.started:
            time.sleep(0.05)
        port = running.servers[0].sockets[0].getsockname()[1]

        def ask(path, **body):
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
            if body:
                request.data = json.dumps(body).encode()
                request.add_header("content-type", "application/json")
            with urllib.request.urlopen(request) as reply:
                return reply.read()

        assert json.loads(ask("/v1/learn", text="the quick brown fox", source="fox"))["version"] == 1
        assert json.loads(ask("/v1/completions", prompt="the", max_tokens=3))["choices"]
        assert b"attractor" in ask("/metrics")
        assert b"<!doctype html>" in ask("/")
        assert ask("/dashboard/plotly.min.js")
        running.should_exit = True
        thread.join()


with tempfile.TemporaryDirectory() as folder:
    layer()
    step(Path(folder))
    if sys.argv[1:] != ["core"]:
        every_module()
        train(Path(folder))
        retrofit(Path(folder))
        trainer(Path(folder))
        lesson()
        server(Path(folder))
print("all of it works")
