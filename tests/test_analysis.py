import pytest
import torch
from test_layer import SMALL, build, every_variant
from torch.utils.flop_counter import FlopCounterMode

from attractor import APN, analysis, monitor
from attractor.config import MoEConfig
from attractor.layer import LOCAL_ROLES, PATCH_ROLES, ROLES
from attractor.moe import MoE, Switch


@every_variant
def test_multiply_adds_are_what_torch_counts(variant):
    layer = build(**variant, backend="reference")  # the counter cannot look into our own operators
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(7, 12))
    assert counter.get_total_flops() == 2 * 7 * analysis.multiply_adds(layer)["total"]


@pytest.mark.parametrize("kind", [MoE, Switch])
def test_multiply_adds_of_a_mixture_are_what_torch_counts(kind):
    layer = kind(12, MoEConfig(num_experts=5)).eval()
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(7, 12))
    assert counter.get_total_flops() == 2 * 7 * analysis.multiply_adds(layer)["total"]


def test_active_parameters():
    counts = analysis.parameter_counts(APN(384, num_patches=256, top_k=4, rank=32, device="meta"))
    assert counts["active"] == 256 * 384 + 384 * 32 + 4 * (384 * 32 + 2 * 32)
    assert sum(counts[role] for role in ("prototypes", "encoder", "gates", "decoders")) == counts["total"]
    everyone = APN(8, num_patches=4, top_k=4, rank=2)
    assert analysis.parameter_counts(everyone)["active"] == analysis.parameter_counts(everyone)["total"]


@every_variant
def test_effective_rank(variant):
    layer = build(dim=24, **variant)
    x = torch.randn(9, 24)
    x[4] = torch.nan  # not routed, so it has no rank
    ranks = analysis.effective_rank(layer, x.reshape(3, 3, 24))
    assert len(ranks.map) == 8
    shared = layer.decoder_base is not None
    assert (ranks.map == 4).all()  # one shared code of size 4: less than the paper's bound of k * r = 12
    assert (ranks.span == (4 + 3 * layer.offset_out.shape[1] if shared else 12)).all()
    assert (ranks.span <= layer.config.top_k * layer.config.rank).all()


def test_outputs_of_one_active_set_span_what_the_rank_says():
    """With every patch active the updates of many tokens fill k * r dimensions: the span, not the map."""
    layer = build(dim=24, num_patches=3, dtype=torch.float64)
    x = torch.randn(200, 24, dtype=torch.float64)
    assert torch.linalg.matrix_rank(layer(x)) == 12 == analysis.effective_rank(layer, x[:1]).span


def test_uniform_overlap():
    torch.manual_seed(0)
    indices = torch.rand(4000, 20).argsort(1)[:, :3]
    assert monitor.mean_overlap(indices, 20) == pytest.approx(analysis.uniform_overlap(20, 3), rel=0.02)


@every_variant
@pytest.mark.parametrize("roles", [("decoders",), ("prototypes", "gates", "decoders"), ("encoder", "gates")])
def test_update_surface_covers_every_gradient(variant, roles):
    layer = build(**variant)
    x = torch.randn(3, 12)
    surface = analysis.update_surface(layer, x, roles=roles)
    layer(x).sum().backward()
    changed = 0
    for name, parameter in layer.named_parameters():
        if ROLES[name] not in roles:
            continue
        if ROLES[name] == "prototypes":  # the softmax is over the active set: only its prototypes matter
            outside = torch.ones(10, dtype=torch.bool).index_fill(0, surface.patches, False)
            assert not parameter.grad[outside].any()
        changed += int((parameter.grad != 0).sum())
    assert 0 < changed <= surface.parameters
    assert surface.fraction == surface.parameters / sum(p.numel() for p in layer.parameters())
    assert surface.is_local == (roles == ("decoders",))


@pytest.mark.parametrize("tokens", [1, 2, 5, 50])
def test_interference_bound_holds(tokens):
    """Proposition 1 by simulation: draw B-streams, touch their patches, see what A-tokens read of them."""
    layer = build(num_patches=40, temperature=0.2)
    a, b = torch.randn(300, 12), torch.randn(300, 12) + 1
    _, stats_a = layer(a, return_stats=True)
    _, stats_b = layer(b, return_stats=True)
    overlap = monitor.expected_overlap(stats_a.indices, stats_b.indices, 40)
    bound = analysis.interference_bound(layer, overlap, tokens=tokens)
    per_patch = sum(p[0].numel() for p in layer.patch_parameters())
    total = sum(p.numel() for p in layer.parameters())
    measured = []
    for _ in range(400):
        touched = torch.zeros(40, dtype=torch.bool)
        touched[stats_b.indices[torch.randint(300, (tokens,))].flatten()] = True
        measured.append(touched[stats_a.indices].sum(1).double().mean() * per_patch / total)
    measured = torch.stack(measured)
    noise = 4 * float(measured.std() / len(measured) ** 0.5)
    assert float(measured.mean()) <= bound + noise
    if tokens == 1:
        assert float(measured.mean()) == pytest.approx(
            bound, abs=noise
        )  # one token: the bound is an equality


def test_a_moved_prototype_breaks_the_overlap():
    """Disjoint before, one B-token updates its own patch alone, and an A-token reads what it changed."""
    layer = build(dim=4, num_patches=4, top_k=1, rank=2)
    with torch.no_grad():
        layer.prototypes.copy_(torch.eye(4))
    a, b = torch.eye(4)[:1], torch.eye(4)[1:2]
    _, stats_a = layer(a, return_stats=True)
    _, stats_b = layer(b, return_stats=True)
    overlap = monitor.expected_overlap(stats_a.indices, stats_b.indices, 4)
    assert overlap == 0
    with torch.no_grad():
        layer.prototypes[1] = a[0]
        layer.prototypes[0] = torch.tensor([0.9, 0.1, 0.0, 0.0])
    layer.prototypes.data[0] = torch.tensor([0.9, 0.5, 0.0, 0.0])
    _, after = layer(a, return_stats=True)
    assert after.indices.item() == 1  # B's patch
    total = sum(p.numel() for p in layer.parameters())
    per_patch = sum(p[0].numel() for p in layer.patch_parameters())
    bound = analysis.interference_bound(layer, overlap, roles=PATCH_ROLES)
    assert bound >= (per_patch + 4) / total
    assert analysis.interference_bound(layer, overlap) == 0  # with a fixed router nothing is shared


def test_interference_bound_exactly():
    layer = APN(**SMALL)
    total, patch = sum(p.numel() for p in layer.parameters()), 2 * 4 + 4 * 12
    cases = {
        (0.5, 2, LOCAL_ROLES): 2 * 0.5 * patch,
        (0.5, 100, LOCAL_ROLES): 3 * patch,
        (0.5, 2, PATCH_ROLES): 3 * patch + 6 * 12,
        (0.5, 100, PATCH_ROLES): 3 * patch + 10 * 12,
        (0.5, 0, PATCH_ROLES): 0,
        (0.5, 1, ("gates", "encoder")): 0.5 * 8 + 48,
    }
    for (overlap, tokens, roles), expected in cases.items():
        bound = analysis.interference_bound(layer, overlap, tokens=tokens, roles=roles)
        assert bound == pytest.approx(expected / total)


def test_update_surface_exactly():
    layer = build(patch_dropout=0.5)
    x = torch.cat([torch.randn(2, 3, 12), torch.full((1, 3, 12), torch.nan)])
    state = torch.get_rng_state()
    surface = analysis.update_surface(layer, x, roles=PATCH_ROLES)
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.training
    _, stats = layer.eval()(x, return_stats=True)
    assert surface.patches.tolist() == sorted(set(stats.indices[:2].flatten().tolist()))
    assert surface.parameters == len(surface.patches) * (12 + 2 * 4 + 4 * 12)
    assert analysis.update_surface(layer, x[2:]).patches.numel() == 0


def test_rank_of_the_full_jacobian():
    """The routing weights move with the token: k - 1 directions more than the map with fixed weights."""
    for top_k in (1, 2, 4):
        layer = build(dim=24, num_patches=10, top_k=top_k, rank=5, temperature=0.5, dtype=torch.float64)
        jacobian = torch.func.jacrev(layer)(torch.randn(24, dtype=torch.float64))
        assert torch.linalg.matrix_rank(jacobian) == 5 + top_k - 1


def test_interference_bound_counts_shared_parameters():
    layer = APN(**SMALL)
    total = sum(p.numel() for p in layer.parameters())
    assert analysis.interference_bound(layer, 0.0, roles=("decoders",)) == 0
    assert analysis.interference_bound(layer, 0.0, roles=("encoder",)) == layer.encoder.numel() / total
    assert analysis.interference_bound(layer, 3.0, tokens=10**9) < 1
    with pytest.raises(ValueError, match=r"overlap=3\.5 must lie between 0 and top_k=3"):
        analysis.interference_bound(layer, 3.5)
    with pytest.raises(ValueError, match="tokens=-1 must not be negative"):
        analysis.interference_bound(layer, 1.0, tokens=-1)
    with pytest.raises(ValueError, match="roles='decoders' must be a sequence of roles"):
        analysis.interference_bound(layer, 1.0, roles="decoders")
    with pytest.raises(ValueError, match="unknown roles"):
        analysis.update_surface(layer, torch.randn(2, 12), roles=("heads",))


def test_disjoint_domains_do_not_interfere():
    """Equation (16) acted out: training on B's active patches leaves A's outputs bit-identical."""
    layer = build(dim=12, num_patches=10, top_k=2, temperature=0.1)
    with torch.no_grad():
        layer.prototypes.zero_()
        layer.prototypes[:5, 0] = layer.prototypes[5:, 1] = 1
        layer.prototypes[:, 2:] = 0.1 * torch.randn(10, 10)
    a, b = 0.1 * torch.randn(20, 12), 0.1 * torch.randn(20, 12)
    a[:, 0] += 3
    b[:, 1] += 3
    before = layer(a)
    surface_a, surface_b = analysis.update_surface(layer, a), analysis.update_surface(layer, b)
    assert not set(surface_a.patches.tolist()) & set(surface_b.patches.tolist())
    optimizer = torch.optim.SGD(layer.patch_parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        layer(b).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer(a), before)
