"""APN in a vision transformer: the layer is not only for text. Four shapes in noise, some seconds on a CPU.

    python examples/vision_block.py

The block has the form that timm's has, `Block(dim, heads)` with a child called `mlp`: in a model of theirs
`block.mlp = APN.like_ffn(dim)` does the same.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import APN, monitor

SHAPES = ("square", "disc", "cross", "ring")
SIZE, PATCH = 16, 4


def images(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures (count, 1, SIZE, SIZE) with a shape at a random place, and which shape each has."""
    kinds = torch.randint(len(SHAPES), (count,), generator=random)
    centres = 5 + torch.rand(count, 2, 1, 1, generator=random) * (SIZE - 11)
    grid = torch.arange(SIZE, dtype=torch.float32)
    y, x = (grid[None, :, None] - centres[:, 0]).abs(), (grid[None, None] - centres[:, 1]).abs()
    far = (x**2 + y**2).sqrt()
    drawn = torch.stack([torch.maximum(x, y) < 4, far < 4, torch.minimum(x, y) < 1, (far - 3.5).abs() < 1], 1)
    picked = drawn[torch.arange(count), kinds] & (torch.maximum(x, y) < 5)
    noise = 0.3 * torch.randn(count, SIZE, SIZE, generator=random)
    return (picked + noise)[:, None], kinds


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = APN.like_ffn(dim)

    def forward(self, h: Tensor) -> Tensor:
        z = self.norm1(h)
        h = h + self.attn(z, z, z, need_weights=False)[0]
        update: Tensor = self.mlp(self.norm2(h))
        return h + update


class VisionTransformer(nn.Module):
    def __init__(self, dim: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, dim, kernel_size=PATCH, stride=PATCH)
        self.position = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads=4) for _ in range(depth)))
        self.head = nn.Linear(dim, len(SHAPES))

    def forward(self, pictures: Tensor) -> Tensor:
        tokens = self.embed(pictures).flatten(2).transpose(1, 2) + self.position  # (B, pieces, dim)
        logits: Tensor = self.head(self.blocks(tokens).mean(1))
        return logits


def main() -> None:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(121):
        pictures, kinds = images(32, random)
        loss = F.cross_entropy(model(pictures), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    seen: list[Tensor] = []
    last = [module for module in model.modules() if isinstance(module, APN)][-1]
    hook = last.register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    with torch.no_grad():
        pictures, kinds = images(512, random)
        right = (model(pictures).argmax(-1) == kinds).float().mean()
        hook.remove()
        _, stats = last(seen[0], return_stats=True)
    print(f"{right:.0%} of 512 new pictures are named rightly")
    for kind, name in enumerate(SHAPES):
        usage = monitor.usage(stats.indices[kinds == kind], last.num_patches)
        busiest = ", ".join(f"{patch} ({usage[patch]:.0%})" for patch in usage.topk(3).indices.tolist())
        print(f"  {name:6s} goes mostly through patches {busiest} of {last.num_patches}")


if __name__ == "__main__":
    main()
