"""Work of fixed shapes, which a GPU repeats as a CUDA graph.

    work = Recorded(compute, *tensors)    # compute(*tensors) -> tensors
    first, second = work(*tensors)        # of the same shapes: all kernels are launched at once

A small model is a thousand small kernels, and a CPU launches them far slower than a GPU runs them. So what is
done again and again is recorded once: it reads its inputs from the same tensors each time, and writes its
outputs to the same ones. On a CPU, and where recording fails, the work is done as it is.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("attractor")

COLUMNS = 128
"""The memory of texts that are continued has a multiple of so many columns."""


def record(
    compute: Callable[[], Any], stream: torch.cuda.Stream, pool: Any = None
) -> torch.cuda.CUDAGraph | None:
    """A graph of what this computes, which is also computed before; None where there can be none.

    Graphs with one `pool` take the memory of the largest of them. They must not run at the same time, and
    what one returned lasts until the next one runs.
    """
    device = stream.device
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(2):  # also what libraries set up when they are first called
            compute()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads go on
            try:
                compute()
            finally:
                graph.capture_end()
        except Exception:
            log.exception("a pass could not be recorded as a CUDA graph: kernels are launched one by one")
            return None
    current.wait_stream(stream)
    return graph


class Recorded:
    """One piece of work: `compute` must do all of it with the tensors that it is given. See `record`."""

    def __init__(self, compute: Callable[..., Sequence[Tensor]], *like: Tensor, pool: Any = None) -> None:
        self.compute = compute
        self.given = [x.detach().clone() for x in like]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Sequence[Tensor] = ()
        if like[0].is_cuda:
            self.graph = record(self._run, torch.cuda.Stream(like[0].device), pool)

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        """The outputs, which the next call writes over."""
        torch._foreach_copy_(self.given, list(given))
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        return self.outputs

    def _run(self) -> None:
        kind = self.given[0].device.type
        with torch.autocast(  # as it is now, without weights that are converted before and gone later
            kind,
            torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=False,
        ):
            self.outputs = self.compute(*self.given)


class Continued:
    """Goes on with texts by the likeliest tokens, in rows and columns of a memory that stays where it is.

    `read(tokens, cache, positions, mask, last)` returns the logits (B, V) of a Hugging Face model at the
    columns `last` (B) of the tokens (B, T).
    """

    def __init__(self, read: Callable[..., Tensor], shapes: Sequence[tuple[int, int]], like: Tensor) -> None:
        self.read, self.shapes, self.like = read, list(shapes), like
        self._steps: dict[tuple[int, int], tuple[Tensor, Recorded]] = {}

    @torch.no_grad()
    def __call__(self, texts: Sequence[list[int]], count: int) -> list[list[int]]:
        lengths = list(map(len, texts))
        rows = 1 << (len(texts) - 1).bit_length()
        columns = -(-(max(lengths) + count) // COLUMNS) * COLUMNS
        whole = [text + [0] * (max(lengths) - len(text)) for text in texts]
        whole += [whole[0]] * (rows - len(texts))
        tokens = torch.tensor(whole, device=self.like.device)
        ends = torch.tensor(lengths + lengths[:1] * (rows - len(texts)), device=self.like.device)
        memory, step = self._step(rows, columns)
        memory.zero_()  # what is masked counts 0 times, and 0 times NaN is NaN
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(rows, -1)
        found = self._likeliest(memory, tokens, places, ends - 1)
        written = [found]
        for number in range(count - 1):
            (found,) = step(found[:, None], (ends + number)[:, None])
            written.append(found.clone())
        return torch.stack(written, 1)[: len(texts)].tolist()

    def _step(self, rows: int, columns: int) -> tuple[Tensor, Recorded]:
        """The memory for so many rows and columns, and reading one more token in each row."""
        if (rows, columns) not in self._steps:
            heads, size = self.shapes[0]
            memory = self.like.new_zeros(len(self.shapes), 2, rows, heads, columns, size)
            token = torch.zeros(rows, 1, dtype=torch.long, device=self.like.device)
            last = token[:, 0].clone()
            compute = partial(self._again, memory, last)
            self._steps[rows, columns] = memory, Recorded(compute, token, token)
        return self._steps[rows, columns]

    def _again(self, memory: Tensor, last: Tensor, token: Tensor, place: Tensor) -> tuple[Tensor]:
        return (self._likeliest(memory, token, place, last),)

    def _likeliest(self, memory: Tensor, tokens: Tensor, places: Tensor, last: Tensor) -> Tensor:
        from attractor.hf.caches import Cache, FixedLayer  # a server of our own models has no transformers

        columns = memory.shape[4]
        sees = torch.arange(columns, device=tokens.device) <= places[..., None]
        cache = Cache(layers=[FixedLayer(own, places, columns) for own in memory])
        return self.read(tokens, cache, places, sees[:, None], last).argmax(-1)
