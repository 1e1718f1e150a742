"""A tour of the layer on toy data: routing, usage, specialisation, and a few online steps.

python examples/layer_tour.py
"""

import math

import torch
from torch import Tensor, nn

from attractor import APN, analysis, monitor

DIM = 64


def bars(shares: Tensor, width: int = 40) -> str:
    top = float(shares.max()) or 1.0
    return "\n".join(
        f"    patch {i:2d} {'#' * round(width * float(share) / top):{width}s} {float(share):6.1%}"
        for i, share in enumerate(shares)
    )


class Domain:
    """Tokens around a few directions; the map to learn is a different rotation around each of them."""

    def __init__(self, kinds: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(kinds, DIM, generator=self.random)
        self.rotations = torch.linalg.qr(torch.randn(kinds, DIM, DIM, generator=self.random)).Q

    def sample(self, tokens: int) -> tuple[Tensor, Tensor]:
        kind = torch.randint(len(self.centres), (tokens,), generator=self.random)
        x = self.centres[kind] + 0.5 * torch.randn(tokens, DIM, generator=self.random)
        return x, torch.einsum("nd,nde->ne", x, self.rotations[kind])


def loss_on(layer: nn.Module, domain: tuple[Tensor, Tensor]) -> Tensor:
    x, target = domain
    return nn.functional.mse_loss(layer(x), target)


def main() -> None:
    torch.manual_seed(0)
    old, new = Domain(kinds=12, seed=1), Domain(kinds=2, seed=2)
    old_test, new_test = old.sample(1024), new.sample(1024)
    layer = APN(DIM, num_patches=48, top_k=2, rank=16)
    costs, parameters = analysis.multiply_adds(layer), analysis.parameter_counts(layer)
    print(f"1. The layer\n    {layer}")
    print(f"    parameters {parameters['total']:,}, of which one token reads {parameters['active']:,}")
    dense = analysis.dense_multiply_adds(DIM)
    print(f"    multiply-adds per token {costs['total']:,}; the dense FFN it replaces: {dense:,}")

    print("\n2. Training on domain A: twelve kinds of token, each to be rotated in its own way")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(401):
        loss = loss_on(layer, old.sample(512))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"    step {step:3d}  loss on A {float(loss.detach()):.3f}")

    with torch.no_grad():
        _, stats_old = layer(old_test[0], return_stats=True)
        _, stats_new = layer(new_test[0], return_stats=True)
    usage = monitor.usage(stats_old.indices, layer.num_patches)
    report = monitor.summary(stats_old)
    print("\n3. Who works on domain A (share of all selections)")
    print(bars(usage))
    print(
        f"    usage entropy {report['usage_entropy']:.2f} of at most {math.log(layer.num_patches):.2f} nats,"
        f" dead patches {report['dead_patches']:.0f}, mean confidence {report['confidence_mean']:.1f}"
    )
    overlap = monitor.expected_overlap(stats_old.indices, stats_new.indices, layer.num_patches)
    print(f"    overlap of A and unseen domain B: {overlap:.2f} of {layer.config.top_k} patches per pair")

    print("\n4. Learning online: domain B has two new kinds; train gates and decoders of active patches only")
    layer.requires_grad_(False)
    for parameter in layer.patch_parameters():
        parameter.requires_grad_(True)
    before = [parameter.detach().clone() for parameter in layer.patch_parameters()]
    touched = torch.zeros(layer.num_patches, dtype=torch.bool)
    sgd = torch.optim.SGD(layer.patch_parameters(), lr=1.0)
    for step in range(101):
        batch = new.sample(64)
        touched[analysis.update_surface(layer, batch[0]).patches] = True
        if step % 25 == 0:
            with torch.no_grad():
                a, b = loss_on(layer, old_test), loss_on(layer, new_test)
            print(f"    step {step:3d}  loss on A {float(a):.3f}  loss on B {float(b):.3f}")
        sgd.zero_grad()
        loss_on(layer, batch).backward()
        sgd.step()
    moved = torch.zeros_like(touched)
    for old_values, new_values in zip(before, layer.patch_parameters(), strict=True):
        moved |= (old_values != new_values).flatten(1).any(1)
    print(f"    patches some token selected: {int(touched.sum())} of {layer.num_patches}")
    print(f"    patches that changed though no token selected them: {int((moved & ~touched).sum())}")
    print(
        "    A suffers only through patches that both domains use; keeping it whole takes more than routing."
    )


if __name__ == "__main__":
    main()
