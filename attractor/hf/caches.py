"""Caches of transformers that keep keys and values where we want them: a kind of layer for each place."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from attractor.model import RaggedCache

__all__ = ["Cache", "FixedLayer", "RowsLayer", "cache_of"]


class Past(DynamicLayer):
    """Keys and values that every pass goes on from, and that none changes."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)


def cache_of(past: dict[int, tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache with the keys and values of some blocks by their numbers, and room for those of the others."""
    cache = DynamicCache()
    if past:
        cache.layers = [Past(*past[n]) if n in past else DynamicLayer() for n in range(max(past) + 1)]
    return cache


class RowsLayer(DynamicLayer):
    """One layer of a cache of ours, whose texts come and go."""

    def __init__(self, rows: RaggedCache, number: int) -> None:
        super().__init__()
        self.rows, self.number = rows, number

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.rows.extend(self.number, keys, values)

    def get_seq_length(self) -> int:
        return self.rows.length


class FixedLayer(DynamicLayer):
    """Memory (2, rows, heads, columns, size) that is always the same: new tokens (B, T) go to `positions`."""

    def __init__(self, memory: Tensor, positions: Tensor, columns: int) -> None:
        super().__init__()
        self.memory, self.at, self.columns = memory, positions[:, None, :, None], columns

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for stored, new in zip(self.memory, (keys, values), strict=True):
            stored.scatter_(2, self.at.expand_as(new), new)
        return self.memory[0][:, :, : self.columns], self.memory[1][:, :, : self.columns]

    def get_seq_length(self) -> int:
        return 0
