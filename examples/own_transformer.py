"""APN in your own transformer: a whole one in plain PyTorch, trained on a line of Hamlet in some seconds.

python examples/own_transformer.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor import APN, warmup_factor

TEXT = "to be, or not to be, that is the question: whether it is nobler in the mind to suffer. " * 20
LETTERS = sorted(set(TEXT))
CONTEXT = 32


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn = APN.like_ffn(dim)  # was: nn.Sequential(Linear(dim, 4 * dim), GELU(), Linear(4 * dim, dim))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        z = self.norm_1(h)
        h = h + self.attention(z, z, z, attn_mask=mask, need_weights=False)[0]
        update: Tensor = self.ffn(self.norm_2(h))
        return h + update  # the layer returns the update; the block adds it


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, dim: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        h = self.token(tokens) + self.position(torch.arange(length))
        for block in self.blocks:
            h = block(h, mask)
        logits: Tensor = self.head(self.norm(h))
        return logits


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    model = Transformer(len(LETTERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(121):
        for layer in model.modules():
            if isinstance(layer, APN):
                layer.set_scale_factor(warmup_factor(step, steps=20))
        starts = torch.randint(len(text) - CONTEXT, (8,))
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    written = text[:6]
    for _ in range(40):
        written = torch.cat([written, model(written[None, -CONTEXT:])[0, -1:].argmax(-1)])
    print("".join(LETTERS[token] for token in written))


if __name__ == "__main__":
    main()
