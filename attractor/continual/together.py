"""Models that share most of their memory, run as one batch.

The path of an overlay has patches of its own and reads everything else from the base. So the sequences of all
paths go through what they share together, and through what they do not share each on its own.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attractor.lm import LanguageModel
from attractor.model import GPT, KVCache

MOST_TOKENS = 16_384
"""With more tokens, of all paths together, one batch saves no time and takes more memory."""


class Together:
    """Paths as one model: tokens (B, T) -> logits (M, B, T, V). `worthwhile` says if they share attention.

    What is shared is looked up once: build it anew when the paths' memory may have changed.
    """

    def __init__(self, paths: Sequence[LanguageModel]) -> None:
        self.paths = [path for path in paths if isinstance(path, GPT) and type(path).forward is GPT.forward]
        self.worthwhile = len(self.paths) == len(paths) > 1
        if not self.worthwhile:
            return
        kinds = [
            (p.config.dim, p.config.num_heads, p.config.num_layers, p.config.dropout) for p in self.paths
        ]
        self.worthwhile = len(set(kinds)) == 1
        parts = [
            [[getattr(block, name) for block in same] for name in ("norm_1", "attention", "norm_2", "ffn")]
            for same in zip(*(path.blocks for path in self.paths), strict=False)
        ]
        self.blocks = [[(parallel, _same_memory(parallel)) for parallel in block] for block in parts]
        self.inputs = [nn.ModuleList([path.embedding, path.positions]) for path in self.paths]
        self.worthwhile &= _same_memory(self.inputs) and any(block[1][1] for block in self.blocks)

    def new_cache(self, batch: int) -> KVCache:
        """Make one cache for all paths; `split` it to let one go on alone."""
        return self.paths[0].new_cache(batch * len(self.paths))

    def __call__(self, tokens: Tensor, cache: KVCache | None = None, own: Sequence[KVCache] = ()) -> Tensor:
        """Read tokens with all paths; `own` are the parts of `cache`."""
        count, base = len(self.paths), self.paths[0]
        start = 0 if cache is None else cache.length
        if start + tokens.shape[1] > base.config.context:
            raise ValueError(f"{start + tokens.shape[1]} tokens do not fit into {base.config.context}")
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        h = (base.embedding(tokens) + base.positions(positions)).repeat(count, 1, 1)  # (M B, T, d)
        h = F.dropout(h, base.config.dropout, base.training)
        for norm_1, (attentions, is_shared), norm_2, ffn in self.blocks:
            x = _each(*norm_1, h)
            if is_shared:
                h = h + attentions[0](x, cache)
            else:
                caches: Sequence[KVCache | None] = own or [None] * count
                pieces = zip(attentions, x.chunk(count), caches, strict=True)
                h = h + torch.cat([attention(piece, mine) for attention, piece, mine in pieces])
            h = h + _each(*ffn, _each(*norm_2, h))
        for used in (cache, *own):
            if used is not None:
                used.length = start + tokens.shape[1]
        hidden = zip(self.paths, h.chunk(count), strict=True)
        return torch.stack([F.linear(path.norm(x), path.embedding.weight) for path, x in hidden])


def _each(parts: Sequence[nn.Module], is_shared: bool, x: Tensor) -> Tensor:
    if is_shared:
        return cast(Tensor, parts[0](x))
    return torch.cat([part(piece) for part, piece in zip(parts, x.chunk(len(parts)), strict=True)])


def _same_memory(parts: Sequence[nn.Module]) -> bool:
    """All parameters and buffers of the parts are the same bytes in the same place."""
    held = [
        [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in (*part.parameters(), *part.buffers())]
        for part in parts
    ]
    return all(own == held[0] for own in held) and len({type(part) for part in parts}) == 1
