"""The mixtures against the papers' equations, one token and one expert at a time in float64."""

import copy
import dataclasses
import math

import pytest
import torch

from attractor import monitor
from attractor.config import GPTConfig, MoEConfig
from attractor.model import MLP
from attractor.moe import MoE, Switch

SMALL = MoEConfig(num_experts=5, top_k=2, hidden=7)
KINDS = pytest.mark.parametrize("kind", [MoE, Switch])
GPU = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch.compile's advice about this GPU
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def build(kind=MoE, dim=6, dtype=torch.float64, seed=0, **changes) -> MoE:
    """A layer with weights large enough that experts and scores differ."""
    torch.manual_seed(seed)
    layer = kind(dim, dataclasses.replace(SMALL, **changes), dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.7)
    return layer


def expert(layer, i: int, x):
    """The dense FFN with these weights, by the error function."""
    h = x @ layer.up[i]
    return (h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))) @ layer.out[i]


def squared_variation(values: list):
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def slow_moe(layer, tokens, epsilon=None):
    """Shazeer et al. (2017), section 2.1, 4 and appendix A. `epsilon` (n, E): the normal draws, if any."""
    experts, top_k = layer.config.num_experts, layer.config.top_k
    updates, active = [], []
    importance, load = [0.0] * experts, [0.0] * experts
    for n, x in enumerate(tokens):
        clean = [x @ layer.router[i] for i in range(experts)]
        scale = [1.0] * experts if epsilon is None else [(1 + (x @ w).exp()).log() for w in layer.noise]
        noisy = [clean[i] if epsilon is None else clean[i] + epsilon[n, i] * scale[i] for i in range(experts)]
        kept = sorted(range(experts), key=lambda i, noisy=noisy: -noisy[i].item())[:top_k]
        total = sum(noisy[i].exp() for i in kept)
        updates.append(sum(noisy[i].exp() / total * expert(layer, i, x) for i in kept))
        active.append(kept)
        for i in kept:
            importance[i] = importance[i] + noisy[i].exp() / total
        for i in range(experts):
            if epsilon is None:
                load[i] += i in kept
            else:
                rival = sorted((noisy[j] for j in range(experts) if j != i), key=torch.Tensor.item)[-top_k]
                load[i] = load[i] + 0.5 * (1 + torch.erf((clean[i] - rival) / scale[i] / math.sqrt(2)))
    balance = squared_variation(importance) + squared_variation([torch.as_tensor(value) for value in load])
    return torch.stack(updates), balance, active


def slow_switch(layer, tokens):
    """Fedus et al. (2022), (1) to (6): a queue for each expert, first come, first served."""
    experts = layer.config.num_experts
    capacity = math.ceil(len(tokens) / experts * layer.config.capacity_factor)
    served, wanted, updates, active = [0] * experts, [0.0] * experts, [], []
    probability = [0.0] * experts
    for x in tokens:
        scores = [(x @ layer.router[i]).exp() for i in range(experts)]
        p = [score / sum(scores) for score in scores]
        best = max(range(experts), key=lambda i, p=p: p[i].item())
        served[best] += 1
        fits = served[best] <= capacity
        updates.append(p[best] * expert(layer, best, x) if fits else torch.zeros_like(x))
        active.append((best, fits))
        wanted[best] += 1 / len(tokens)
        probability = [sum_i + p_i / len(tokens) for sum_i, p_i in zip(probability, p, strict=True)]
    balance = experts * sum(f * p for f, p in zip(wanted, probability, strict=True))
    return torch.stack(updates), balance, active


def assert_same_gradients(layer, x, ours, theirs):
    """Of a mix of update and balance loss, for the input and for every parameter."""
    upstream = torch.randn_like(theirs[0])
    leaves = [x, *layer.parameters()]
    got, expected = (
        torch.autograd.grad((update * upstream).sum() + 3 * balance, leaves, materialize_grads=True)
        for update, balance in (ours, theirs)
    )
    for ours_grad, theirs_grad in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_grad, theirs_grad)
    return got


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("training", [False, True])
def test_moe_equals_the_paper(top_k, training):
    layer = build(top_k=top_k).train(training)
    x = torch.randn(3, 8, 6, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    epsilon = torch.randn(24, 5, dtype=torch.float64) if training else None
    torch.manual_seed(1)  # so that the layer draws the same
    update, stats = layer(x, return_stats=True)
    expected, balance, active = slow_moe(layer, x.flatten(0, 1), epsilon)
    torch.testing.assert_close(update.flatten(0, 1), expected)
    torch.testing.assert_close(stats.balance, balance)
    assert stats.indices.flatten(0, 1).tolist() == active
    gradients = assert_same_gradients(layer, x, (update.flatten(0, 1), stats.balance), (expected, balance))
    if training:
        assert gradients[2].any()  # the size of the noise learns


def test_every_expert_active():
    """Then nobody can be pushed out: the load is even, and there is no k-th rival to look for."""
    layer = build(top_k=5)
    update, stats = layer(torch.randn(4, 6, dtype=torch.float64), return_stats=True)
    importance = torch.zeros(4, 5, dtype=torch.float64).scatter(1, stats.indices, stats.weights).sum(0)
    torch.testing.assert_close(stats.balance, importance.var(correction=0) / importance.mean() ** 2)
    assert update.isfinite().all()


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 5.0])
def test_switch_equals_the_paper(factor):
    layer = build(Switch, capacity_factor=factor)
    x = torch.randn(3, 8, 6, dtype=torch.float64, requires_grad=True)
    update, stats = layer(x, return_stats=True)
    expected, balance, active = slow_switch(layer, x.flatten(0, 1))
    torch.testing.assert_close(update.flatten(0, 1), expected)
    torch.testing.assert_close(stats.balance, balance)
    assert stats.indices.flatten().tolist() == [best for best, _ in active]
    assert (stats.weights.flatten() > 0).tolist() == [fits for _, fits in active]
    assert all(fits for _, fits in active) == (factor == 5.0)
    assert_same_gradients(layer, x, (update.flatten(0, 1), stats.balance), (expected, balance))


@KINDS
def test_gradcheck(kind):
    layer = build(kind, num_experts=3, hidden=2, dim=3)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *values):
        torch.manual_seed(2)  # the same noise each time
        update, stats = torch.func.functional_call(
            layer, dict(zip(names, values, strict=True)), (x,), {"return_stats": True}
        )
        return update, stats.balance, stats.entropy

    leaves = (x, *(parameter.detach().requires_grad_() for parameter in layer.parameters()))
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_tokens_over_capacity_pass_through_in_order():
    layer = build(Switch, num_experts=2, capacity_factor=1.0)
    with torch.no_grad():
        layer.router.copy_(torch.eye(6)[:2] * 3)
    x = torch.randn(10, 6, dtype=torch.float64)
    x[:, 0], x[:, 1] = 0.0, 1.0  # everyone wants expert 1
    x[6, 0] = 2.0
    update, stats = layer(x.view(2, 5, 6), return_stats=True)
    assert stats.indices.flatten().tolist() == [1, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    served = [0, 1, 2, 3, 4, 6]  # five for expert 1, and the one that wanted expert 0
    assert stats.weights.flatten().nonzero().flatten().tolist() == served
    assert update.view(10, 6).any(-1).nonzero().flatten().tolist() == served
    torch.testing.assert_close(layer(x[6:7]), update.view(10, 6)[6:7])


@pytest.mark.parametrize(("tokens", "factor", "capacity"), [(50, 1.1, 11), (51, 1.1, 12), (1, 1e-12, 1)])
def test_capacity_is_rounded_up_and_never_zero(tokens, factor, capacity):
    layer = build(Switch, capacity_factor=factor)
    x = torch.randn(1, 6, dtype=torch.float64).expand(tokens, -1)
    _, stats = layer(x, return_stats=True)
    assert int((stats.weights > 0).sum()) == capacity


def test_an_earlier_token_never_depends_on_a_later_one():
    layer = build(Switch, capacity_factor=0.5)
    x = torch.randn(20, 6, dtype=torch.float64)
    changed = torch.cat([x[:9], torch.randn(11, 6, dtype=torch.float64)])
    assert torch.equal(layer(x)[:9], layer(changed)[:9])


def test_after_training_every_token_is_served():
    layer = build(Switch, capacity_factor=0.5).eval()
    x = torch.randn(20, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.cat([layer(token) for token in x.split(1)]))
    assert layer(x).any(-1).all()


def test_noise_only_while_training():
    layer, x = build(), torch.randn(9, 6, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    state = torch.get_rng_state()
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="nothing would teach the router"):
        build(noise=False, top_k=1)
    silent = build(noise=False)
    assert silent.noise is None
    assert torch.equal(silent(x), silent(x))
    assert build(Switch).noise is None


@KINDS
def test_balance_is_least_when_routing_is_even(kind):
    """Tokens spread over the axes, each expert looking along one of them; then all of them along one axis."""
    layer = build(kind, dim=5, top_k=1).eval()
    even = torch.eye(5, dtype=torch.float64).repeat(4, 1)
    with torch.no_grad():
        layer.router.copy_(4 * torch.eye(5))
    losses = [layer(x, return_stats=True)[1].balance.item() for x in (even, even[:1].expand(20, -1))]
    probability = math.exp(4) / (math.exp(4) + 4)
    least, most = (0.0, 4.0 + 4.0) if kind is MoE else (1.0, 5 * probability)
    assert losses == pytest.approx([least, most])


@KINDS
def test_the_balance_loss_spreads_usage(kind):
    layer = build(kind, dim=16, num_experts=4).train()
    x = torch.randn(256, 16, dtype=torch.float64)
    x[:, 0] += 3  # a common direction: one expert gets almost everything
    with torch.no_grad():
        layer.router.normal_(std=0.1)
        layer.router[0, 0] = 2
    layer.eval()
    before = monitor.summary(layer(x, return_stats=True)[1])
    layer.train()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        layer(x, return_stats=True)[1].balance.backward()
        optimizer.step()
    after = monitor.summary(layer.eval()(x, return_stats=True)[1])
    assert before["max_usage"] > 0.45
    assert after["max_usage"] < 0.32
    assert after["balance_loss"] < before["balance_loss"]


def test_statistics():
    layer = build().eval()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    update, stats = layer(x, return_stats=True)
    assert torch.equal(update, layer(x))
    assert stats.indices.shape == stats.weights.shape == (2, 7, 2)
    logits = x @ layer.router.T
    assert torch.equal(stats.indices[..., 0], logits.argmax(-1))
    torch.testing.assert_close(stats.weights.sum(-1), torch.ones(2, 7, dtype=torch.float64))
    assert (stats.weights[..., 0] >= stats.weights[..., 1]).all()
    torch.testing.assert_close(stats.confidence, logits.amax(-1))
    torch.testing.assert_close(stats.entropy, torch.distributions.Categorical(stats.weights).entropy().mean())
    torch.testing.assert_close(stats.update_norm, update.norm(dim=-1))
    torch.testing.assert_close(stats.input_norm, x.norm(dim=-1))
    summary = monitor.summary(stats)
    assert summary["tokens"] == 14
    assert 1 < summary["effective_patches"] <= 5
    switch = build(Switch)
    _, stats = switch(x, return_stats=True)
    chances = torch.distributions.Categorical(logits=x @ switch.router.T)
    torch.testing.assert_close(stats.entropy, chances.entropy().mean())
    assert stats.indices.shape == (2, 7, 1)


@KINDS
def test_one_expert_is_the_dense_layer(kind):
    """Its weight is always 1: the model's own MLP with the same weights."""
    dense = MLP(GPTConfig(dim=8, num_heads=1)).double()
    layer = kind(8, MoEConfig(num_experts=1, top_k=1), dtype=torch.float64)
    assert layer.hidden == 32
    with torch.no_grad():
        layer.up[0], layer.out[0] = dense.up.weight.T, dense.out.weight.T
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x))


@KINDS
def test_empty_input(kind):
    layer = build(kind)
    x = torch.zeros(2, 0, 6, dtype=torch.float64, requires_grad=True)
    update, stats = layer(x, return_stats=True)
    assert update.shape == (2, 0, 6)
    assert stats.balance.item() == stats.entropy.item() == 0
    (update.sum() + stats.balance + stats.entropy).backward()
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(kind, dtype):
    exact = build(kind).eval()
    layer = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(layer.state_dict())  # the rounded weights
    x = torch.randn(40, 6).to(dtype)
    update, stats = layer(x, return_stats=True)
    expected, exact_stats = exact(x.double(), return_stats=True)
    assert update.dtype == dtype
    assert stats.weights.dtype == torch.float32  # the router is never rounded more than that
    assert torch.equal(stats.indices, exact_stats.indices)
    error = (update.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


@KINDS
def test_autocast(kind):
    layer = build(kind, dtype=torch.float32).eval()
    x = torch.randn(40, 6)
    with torch.autocast("cpu", torch.bfloat16):
        update, stats = layer(x, return_stats=True)
    expected, plain = layer(x, return_stats=True)
    assert update.dtype == torch.bfloat16
    assert torch.equal(stats.weights, plain.weights)
    assert (update - expected).norm() / expected.norm() < 1e-2


@KINDS
def test_same_bits_twice(kind, two_threads):
    layer = build(kind, dim=32, hidden=64, dtype=torch.float32, noise=False)
    x, upstream = torch.randn(3000, 32, requires_grad=True), torch.randn(3000, 32)
    leaves = [x, *layer.parameters()]
    first, second = (torch.autograd.grad(layer(x), leaves, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoEConfig(num_experts=0), "num_experts=0 must be a positive integer"),
        (lambda: MoEConfig(top_k=9), "top_k=9 must not exceed num_experts=8"),
        (lambda: MoEConfig(hidden=-1), "hidden=-1 must be a positive integer"),
        (lambda: MoEConfig(noise=1), "noise=1 must be True or False"),
        (lambda: MoEConfig(capacity_factor=0), "capacity_factor=0 must be a positive number"),
        (lambda: MoE(6, MoEConfig(capacity_factor=2.0)), 'capacity_factor=2.0 needs ffn="switch"'),
        (lambda: Switch(6, MoEConfig(top_k=3)), 'top_k=3 contradicts ffn="switch"'),
        (lambda: MoE(0), "dim=0 must be a positive integer"),
        (lambda: MoE(6, dropout=1.0), "dropout=1.0 must be a probability"),
        (lambda: MoE(6)(torch.zeros(3, 5)), r"input of shape \(3, 5\): the last dimension must be dim=6"),
        (lambda: MoE(6)(torch.zeros(3, 6).double()), "input of dtype torch.float64 for a layer of dtype"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


ON_GPU = pytest.mark.parametrize("kind", [pytest.param(kind, marks=GPU) for kind in (MoE, Switch)])


@ON_GPU
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_cuda_matches_float64(kind, compiled, mode):
    """Expert 4 gets no token: its gradients must be zeros, not what was in memory."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    exact = build(kind, dim=64, hidden=48)
    with torch.no_grad():
        exact.router[4, 0] = -1000
    exact = exact.to(dtype).double().eval()  # the same rounded weights on both sides
    layer = copy.deepcopy(exact).cuda().to(dtype)
    x, upstream = torch.randn(300, 64).to(dtype), torch.randn(300, 64)
    x[:, 0] = 1
    wanted, got = x.double().requires_grad_(), x.cuda().requires_grad_()
    expected, expected_stats = exact(wanted, return_stats=True)
    call = torch.compile(layer, fullgraph=mode != "float32") if compiled else layer
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
        update, stats = call(got, return_stats=True)
    assert torch.equal(stats.indices.cpu(), expected_stats.indices)
    torch.testing.assert_close(stats.balance.cpu().double(), expected_stats.balance, rtol=1e-4, atol=1e-4)
    (expected * upstream).sum().backward()
    (update * upstream.cuda()).sum().backward()
    pairs = [(update, expected), (got.grad, wanted.grad)]
    parameters = zip(layer.parameters(), exact.parameters(), strict=True)
    pairs += [(a.grad, b.grad) for a, b in parameters if b.grad is not None]
    for ours, theirs in pairs:
        error = (ours.double().cpu() - theirs).norm() / theirs.norm()
        assert error < (1e-5 if mode == "float32" else 2e-2)
    assert not layer.up.grad[4].any()


@ON_GPU
def test_cuda_never_waits_for_the_host(kind):
    layer = build(kind, dim=64, hidden=48, dtype=torch.float32).cuda()
    x = torch.randn(300, 64).cuda()
    for checked in (False, True):  # the first time loads libraries
        torch.cuda.set_sync_debug_mode("error" if checked else "default")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                update, stats = layer(x, return_stats=True)
            (update.float().sum() + stats.balance).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
