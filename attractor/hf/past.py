"""Keys and values in caches of transformers that every pass of a lesson goes on from."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


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
