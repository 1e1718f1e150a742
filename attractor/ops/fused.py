"""The whole layer in a few Triton kernels: what GPUs use.

Independent decoders and static prototypes, with either gate and with patch dropout, run fused: scores never
become an (n, K) tensor, and what is saved for the backward pass is as small as the code. Shared decoders and
contextual prototypes follow the reference's equations and use the kernels for the decoding alone.

Saved and passed between the two operators are the tokens, what `route` says of them, and a plan: the pairs
in the order of their patches and the tiles they are cut into. Shape suffixes as in reference.py.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attractor.ops import reference
from attractor.ops.reference import APNOutput

HAS_TRITON = importlib.util.find_spec("triton") is not None
FEW_TOKENS = 64
"""Up to here a token reads its decoders directly; grouping would cost more than it saves."""
FEW_PATCHES = 4096
"""Up to here one program can choose from all scores of a token."""
MOST_RANK = 256
SEGMENT = 512
CHUNK = 64


def why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """None if these kernels can run, else the reason."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device_type != "cuda" and not (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"Triton kernels need a GPU, and the input is on {device_type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels know float32, bfloat16 and float16, not {dtype}"
    return None


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _power(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())


class Shape(NamedTuple):
    """Sizes of one call, and the blocks it is cut into."""

    n: int
    d: int
    K: int
    k: int
    r: int
    dtype: torch.dtype  # of the matrix products

    @property
    def tile(self) -> int:
        """Pairs in a tile: about what a patch has, so that tiles are full."""
        return min(64, _power(max(16, self.n * self.k // self.K)))

    @property
    def most_tiles(self) -> int:
        return -(-self.n * self.k // self.tile) + min(self.K, self.n * self.k)

    @property
    def most_segments(self) -> int:
        return -(-self.n * self.k // SEGMENT) + min(self.K, self.n * self.k)

    @property
    def most_parts(self) -> int:
        """Segments of patches with more than one: at most twice as many as full ones."""
        return 2 * (self.n * self.k // SEGMENT) + 1

    def sizes(self) -> dict[str, int]:
        return {"D": self.d, "R": self.r, "R_P": _power(self.r, 16)}

    def dots(self) -> dict[str, Any]:
        exact = torch.get_float32_matmul_precision() == "highest"
        return {"DTYPE": _triton_type(self.dtype), "PRECISION": "ieee" if exact else "tf32"}

    def blocks(self, kernel: str) -> dict[str, int]:
        """Block sizes, warps and pipeline stages of a kernel, tuned on an H200 (docs/performance.md)."""
        small = self.r <= 64
        programs = 132  # about one wave of a large GPU
        chosen = {
            "route": {"BN": 128 if self.n >= 96 * programs else 64 if self.n >= 24 * programs else 16,
                      "BK": 256, "BD": 64, "num_warps": 8, "num_stages": 3},
            "decode": {"BD": 64, "num_warps": 4 if small else 8, "num_stages": 3},
            "combine": {"BN": 8, "BD": 128, "num_warps": 4},
            "few_scores": {"BK": max(2, min(32, 16384 // _power(self.d))), "num_warps": 4},
            "few_tokens": {"BD": 64, "num_warps": 4},
            "decode_backward": {"BD": 64, "num_warps": 4 if small else 8, "num_stages": 4 if small else 3},
            "token_backward": {"BN": 16, "BD": 128, "num_warps": 4, "num_stages": 2},
            "bank_backward": {"BM": 64, "BD": 128, "num_warps": 4, "num_stages": 3},
            "encoder_backward": {"BN": 128, "BD": 64, "num_warps": 4, "num_stages": 3},
            "sum_parts": {"BD": 128, "BT": 16, "num_warps": 4},
        }[kernel]  # fmt: skip
        return chosen | {"BD": min(chosen["BD"], _power(self.d, 16))} if "BD" in chosen else chosen


class Plan(NamedTuple):
    """Pairs in the order of their patches, and the numbers kernels.py describes."""

    order: Tensor
    numbers: Tensor

    @classmethod
    def empty(cls, shape: Shape, device: torch.device) -> "Plan":
        size = 5 * shape.K + 2 + shape.most_segments + shape.most_tiles
        order = torch.empty(shape.n * shape.k, dtype=torch.int32, device=device)
        return cls(order, torch.empty(size, dtype=torch.int32, device=device))

    def make(self, shape: Shape, idx_nk: Tensor, histogram: Tensor) -> None:
        from attractor.ops import kernels

        K, pairs = shape.K, shape.n * shape.k
        chunks, block = histogram.shape[0], min(8, _power(K))
        kernels.scan_chunks[(-(-K // block),)](histogram, self.numbers, chunks, K=K, BC=256, BK=block)
        kernels.make_plan[(1,)](
            self.numbers, shape.most_segments, K=K, BK=min(1024, _power(K)), BM=shape.tile
        )
        kernels.place[(chunks,)](idx_nk, histogram, self.numbers, self.order, pairs, K=K)


def _empty_histogram(shape: Shape, device: torch.device) -> Tensor:
    return torch.zeros(-(-shape.n * shape.k // CHUNK), shape.K, dtype=torch.int32, device=device)


def _gate_kind(a_Kr: Tensor | None, b_Kr: Tensor | None) -> int:
    return 0 if b_Kr is None else 1 if a_Kr is None else 2


def _decode(
    shape: Shape, plan: Plan, u: Tensor, w: Tensor | None, a: Tensor | None, b: Tensor | None, U_Krd: Tensor,
    idx_nk: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Eqs. (5) and (6) from a plan: every tile of pairs, then the sum over the slots."""
    from attractor.ops import kernels

    n, d, k = shape.n, shape.d, shape.k
    y_pd = torch.empty(n * k, d, dtype=shape.dtype, device=u.device)
    kernels.decode[(shape.most_tiles,)](
        u, w, a, b, U_Krd, *plan, y_pd, shape.most_segments, K=shape.K, k=k, BM=shape.tile,
        GATE=_gate_kind(a, b), **shape.sizes(), **shape.dots(), **shape.blocks("decode"),
    )  # fmt: skip
    update_nd = torch.empty(n, d, dtype=shape.dtype, device=u.device)
    blocks = shape.blocks("combine")
    kernels.combine[(-(-n // blocks["BN"]), -(-d // blocks["BD"]))](
        y_pd, idx_nk, update_nd, n, scale, D=d, k=k, **blocks
    )
    return update_nd


def _decode_few(
    shape: Shape, scores: Tensor | None, u: Tensor, a: Tensor | None, b: Tensor | None, U_Krd: Tensor,
    idx_nk: Tensor, w_nk: Tensor | None, confidence_n: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    from attractor.ops import kernels

    update_nd = torch.empty(shape.n, shape.d, dtype=shape.dtype, device=u.device)
    blocks = shape.blocks("few_tokens")
    kernels.few_tokens[(shape.n, -(-shape.d // blocks["BD"]))](
        scores, u, a, b, U_Krd, idx_nk, w_nk, confidence_n, update_nd, scale, K=shape.K,
        K_P=_power(shape.K, 2), k=shape.k, k_P=_power(shape.k, 2), GATE=_gate_kind(a, b), **shape.sizes(),
        **blocks,
    )  # fmt: skip
    return update_nd


class _PairGradients(NamedTuple):
    code: Tensor  # of each pair's code: of u, or of the codes that were given
    weight: Tensor | None
    slope_parts: Tensor | None  # one row per tile
    bias_parts: Tensor | None
    codes: Tensor  # not a gradient: w phi of each pair, by patch; or the codes that were given


def _decode_backward(
    shape: Shape, plan: Plan, grad_nd: Tensor, u: Tensor, w: Tensor | None, a: Tensor | None,
    b: Tensor | None, U_Krd: Tensor, scale: float,
) -> _PairGradients:  # fmt: skip
    from attractor.ops import kernels

    kind, pairs, tiles = _gate_kind(a, b), shape.n * shape.k, shape.most_tiles

    def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=u.device)

    grads = _PairGradients(
        new(pairs, shape.r, dtype=shape.dtype),
        new(pairs) if kind else None,
        new(tiles, shape.r) if kind == 2 else None,
        new(tiles, shape.r if kind == 2 else 1) if kind else None,
        new(pairs, shape.r, dtype=shape.dtype) if kind else u,
    )
    kernels.decode_backward[(tiles,)](
        grad_nd, u, w, a, b, U_Krd, *plan, grads.codes, *grads[:4], shape.most_segments, scale, K=shape.K,
        k=shape.k, BM=shape.tile, GATE=kind, **shape.sizes(), **shape.dots(),
        **shape.blocks("decode_backward"),
    )  # fmt: skip
    return grads


def _bank_backward(
    shape: Shape, plan: Plan, grad_nd: Tensor, grads: _PairGradients, U_Krd: Tensor, scale: float,
    a: Tensor | None = None, b: Tensor | None = None, z: Tensor | None = None, P: Tensor | None = None,
    s: Tensor | None = None, grad_s: Tensor | None = None, coefficient: Tensor | None = None,
    inverse_p: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients with one row per patch: decoders and, unless codes were given, prototypes, biases, slopes."""
    from attractor.ops import kernels

    kind, blocks, last = _gate_kind(a, b), shape.blocks("bank_backward"), shape.blocks("sum_parts")
    grad_U = torch.empty_like(U_Krd)
    grad_P, grad_b, grad_a = (None if x is None else torch.empty_like(x) for x in (P, b, a))
    part_U = torch.empty(shape.most_parts, shape.r * shape.d, device=U_Krd.device)
    part_P = torch.empty(shape.most_parts, shape.d, device=U_Krd.device) if kind else None
    part_radial = torch.empty(shape.most_parts, device=U_Krd.device) if kind else None
    kernels.bank_backward[(shape.most_segments, -(-shape.d // blocks["BD"]))](
        grad_nd, z, P, grads.codes, s, grad_s, coefficient, inverse_p, *plan, grad_U, grad_P, part_U, part_P,
        part_radial, scale, K=shape.K, k=shape.k, GATE=kind, **shape.sizes(), **shape.dots(), **blocks,
    )  # fmt: skip
    kernels.sum_parts[(shape.K, -(-shape.d // last["BD"]))](
        P, inverse_p, plan.numbers, part_U, part_P, part_radial, grads.slope_parts, grads.bias_parts, grad_U,
        grad_P, grad_a, grad_b, K=shape.K, BM=shape.tile, GATE=kind, **shape.sizes(), **last,
    )  # fmt: skip
    return [grad for grad in (grad_U, grad_P, grad_b, grad_a) if grad is not None]


def _operator(run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as an operator that torch.compile calls and does not look into.

    What torch.library.custom_op does, without its check of every call for aliasing: that took longer than
    the launches.
    """
    name = f"attractor::{run.__name__}"
    torch.library.define(name, torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(name, ("cuda", "cpu"), run)
    torch.library.register_fake(name, fake)
    return getattr(torch.ops.attractor, run.__name__).default


def fused(
    z_nd: Tensor, P_Kd: Tensor, V_dr: Tensor, a_Kr: Tensor | None, b_Kr: Tensor, U_Krd: Tensor,
    keep_nk: Tensor | None, top_k: int, temperature: float, scale: float, cosine: bool, dtype: torch.dtype,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """update, indices, weights, confidence; then what the backward pass needs (empty if there is none)."""
    from attractor.ops import kernels

    (n, d), (K, r) = z_nd.shape, (P_Kd.shape[0], V_dr.shape[1])
    shape = Shape(n, d, K, top_k, r, dtype)
    device = z_nd.device
    outputs = _fake_fused(
        z_nd, P_Kd, V_dr, a_Kr, b_Kr, U_Krd, keep_nk, top_k, temperature, scale, cosine, dtype, backward
    )
    _, idx_nk, w_nk, confidence_n, s_nk, u_nr, inverse_z_n, inverse_p_K, order, numbers = outputs
    if n == 0:
        return outputs
    if not backward and n <= FEW_TOKENS and K <= FEW_PATCHES and keep_nk is None:
        scores_nK = torch.empty(n, K, device=device)
        blocks = shape.blocks("few_scores")
        kernels.few_scores[(n, -(-K // blocks["BK"]) + -(-r // blocks["BK"]))](
            z_nd, P_Kd, V_dr, scores_nK, u_nr, 1 / temperature, K=K, D=d, R=r, D_P=_power(d, 16),
            COSINE=cosine, **blocks,
        )  # fmt: skip
        update_nd = _decode_few(shape, scores_nK, u_nr, a_Kr, b_Kr, U_Krd, idx_nk, w_nk, confidence_n, scale)
        return update_nd, *outputs[1:]
    histogram = _empty_histogram(shape, device)
    float32 = z_nd.dtype == torch.float32
    split = float32 and (dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest")
    blocks = shape.blocks("route") | ({"BD": min(32, _power(d, 16)), "num_stages": 2} if float32 else {})
    blocks["BK"] = min(blocks["BK"], _power(K, 16))
    kernels.route[(-(-n // blocks["BN"]),)](
        z_nd, P_Kd, V_dr, keep_nk, idx_nk, w_nk, s_nk, u_nr, inverse_z_n, inverse_p_K, confidence_n,
        histogram, n, 1 / temperature, K=K, k=top_k, k_P=_power(top_k, 2), COSINE=cosine, SPLIT=split,
        HAS_KEEP=keep_nk is not None, COUNT=True, **shape.sizes(), **shape.dots(), **blocks,
    )  # fmt: skip
    plan = Plan(order, numbers) if backward else Plan.empty(shape, device)
    plan.make(shape, idx_nk, histogram)
    update_nd = _decode(shape, plan, u_nr, w_nk, a_Kr, b_Kr, U_Krd, idx_nk, scale)
    return update_nd, *outputs[1:]


def _fake_fused(
    z_nd: Tensor, P_Kd: Tensor, V_dr: Tensor, a_Kr: Tensor | None, b_Kr: Tensor, U_Krd: Tensor,
    keep_nk: Tensor | None, top_k: int, temperature: float, scale: float, cosine: bool, dtype: torch.dtype,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (n, d), (K, r) = z_nd.shape, (P_Kd.shape[0], V_dr.shape[1])
    plan = Plan.empty(Shape(n if backward else 0, d, K, top_k, r, dtype), z_nd.device)

    def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=z_nd.device)

    return (
        new(n, d, dtype=dtype), new(n, top_k, dtype=torch.int32), new(n, top_k), new(n), new(n, top_k),
        new(n, r), new(n), new(K), plan.order, plan.numbers,
    )  # fmt: skip


_fused = _operator(fused, _fake_fused)


def fused_backward(
    grad_nd: Tensor, grad_w_nk: Tensor | None, grad_confidence_n: Tensor | None, z_nd: Tensor, P_Kd: Tensor,
    V_dr: Tensor, a_Kr: Tensor | None, b_Kr: Tensor, U_Krd: Tensor, idx_nk: Tensor, w_nk: Tensor,
    s_nk: Tensor, u_nr: Tensor, inverse_z_n: Tensor, inverse_p_K: Tensor, order: Tensor, numbers: Tensor,
    temperature: float, scale: float, cosine: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of z, V, U, P, b and, with vector gates, a."""
    from attractor.ops import kernels

    (n, d), (K, r), k = z_nd.shape, (P_Kd.shape[0], V_dr.shape[1]), idx_nk.shape[1]
    shape = Shape(n, d, K, k, r, grad_nd.dtype)
    if n == 0:
        given = [z_nd, V_dr, U_Krd, P_Kd, b_Kr] + ([] if a_Kr is None else [a_Kr])
        return [torch.zeros_like(x) for x in given]
    plan = Plan(order, numbers)
    grads = _decode_backward(shape, plan, grad_nd, u_nr, w_nk, a_Kr, b_Kr, U_Krd, scale)
    grad_u_nr = torch.empty(n, r, dtype=shape.dtype, device=z_nd.device)
    grad_s_nk, coefficient_nk, grad_z_nd = map(torch.empty_like, (w_nk, w_nk, z_nd))
    blocks = shape.blocks("token_backward")
    kernels.token_backward[(-(-n // blocks["BN"]),)](
        z_nd, P_Kd, V_dr, idx_nk, w_nk, s_nk, inverse_z_n, inverse_p_K, grads.code, grads.weight, grad_w_nk,
        grad_confidence_n, grad_u_nr, grad_s_nk, coefficient_nk, grad_z_nd, n, 1 / temperature, k=k,
        k_P=_power(k, 2), COSINE=cosine, HAS_W=grad_w_nk is not None,
        HAS_CONFIDENCE=grad_confidence_n is not None, **shape.sizes(), **shape.dots(), **blocks,
    )  # fmt: skip
    blocks = shape.blocks("encoder_backward")
    channels = -(-d // blocks["BD"])
    parts = torch.empty(max(1, min(-(-n // blocks["BN"]), 256 // channels)), d, r, device=z_nd.device)
    kernels.encoder_backward[(parts.shape[0], channels)](
        z_nd, idx_nk, grad_u_nr, parts, n, k=k, **shape.sizes(), **shape.dots(), **blocks
    )
    grad_V_dr = torch.empty_like(V_dr)
    kernels.add_up[(-(-d * r // 256),)](parts, grad_V_dr, parts.shape[0], SIZE=d * r, BLOCK=256)
    banks = _bank_backward(
        shape, plan, grad_nd, grads, U_Krd, scale, a_Kr, b_Kr, z_nd, P_Kd, s_nk, grad_s_nk, coefficient_nk,
        inverse_p_K,
    )  # fmt: skip
    return [grad_z_nd, grad_V_dr, *banks]


def _fake_fused_backward(
    grad_nd: Tensor, grad_w_nk: Tensor | None, grad_confidence_n: Tensor | None, z_nd: Tensor, P_Kd: Tensor,
    V_dr: Tensor, a_Kr: Tensor | None, b_Kr: Tensor, U_Krd: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    given = [z_nd, V_dr, U_Krd, P_Kd, b_Kr] + ([] if a_Kr is None else [a_Kr])
    return [torch.empty_like(x) for x in given]


_fused_backward = _operator(fused_backward, _fake_fused_backward)


class _Fused(torch.autograd.Function):
    """First derivatives in reverse mode; anything else is an error, never a silent zero."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, P: Tensor, V: Tensor, a: Tensor | None, b: Tensor, U: Tensor,
        keep: Tensor | None, top_k: int, temperature: float, scale: float, cosine: bool, dtype: torch.dtype,
        backward: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        update, idx, w, confidence, *rest = _fused(
            z, P, V, a, b, U, keep, top_k, temperature, scale, cosine, dtype, backward
        )
        if backward:
            ctx.save_for_backward(z, P, V, a, b, U, idx, w, *rest)
        ctx.options = (temperature, scale, cosine)
        ctx.mark_non_differentiable(idx)
        ctx.set_materialize_grads(False)
        return update, idx, w, confidence

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None, grad_w: Tensor | None, grad_c: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        z, a, U = saved[0], saved[3], saved[5]
        if grad is None:  # only the weights or the confidence were used
            grad = torch.zeros(z.shape, dtype=U.dtype, device=z.device)
        extra = (None if x is None else x.contiguous() for x in (grad_w, grad_c))
        dz, dV, dU, dP, db, *da = _fused_backward(grad.contiguous(), *extra, *saved, *ctx.options)
        return dz, dP, dV, da[0] if a is not None else None, db, dU, *[None] * 7


def fused_decode(
    code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_k code[n, k] @ U[idx[n, k]] -> (n, d), and the plan."""
    from attractor.ops import kernels

    (n, k, q), (K, _, d) = code_nkq.shape, U_Kqd.shape
    shape = Shape(n, d, K, k, q, code_nkq.dtype)
    update_nd, order, numbers = _fake_decode(code_nkq, U_Kqd, idx_nk, backward)
    if n == 0:
        return update_nd, order, numbers
    if n <= FEW_TOKENS and not backward:
        update_nd = _decode_few(shape, None, code_nkq, None, None, U_Kqd, idx_nk, None, None, 1.0)
        return update_nd, order, numbers
    plan = Plan(order, numbers) if backward else Plan.empty(shape, code_nkq.device)
    histogram = _empty_histogram(shape, code_nkq.device)
    kernels.count[(histogram.shape[0],)](idx_nk, histogram, n * k, K=K)
    plan.make(shape, idx_nk, histogram)
    return _decode(shape, plan, code_nkq, None, None, None, U_Kqd, idx_nk, 1.0), order, numbers


def _fake_decode(
    code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (n, k, q), (K, _, d) = code_nkq.shape, U_Kqd.shape
    plan = Plan.empty(Shape(n if backward else 0, d, K, k, q, code_nkq.dtype), code_nkq.device)
    return code_nkq.new_empty(n, d), plan.order, plan.numbers


_fused_decode = _operator(fused_decode, _fake_decode)


def fused_decode_backward(
    grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, order: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    (n, k, q), (K, _, d) = code_nkq.shape, U_Kqd.shape
    if n == 0:
        return torch.zeros_like(code_nkq), torch.zeros_like(U_Kqd)
    shape = Shape(n, d, K, k, q, code_nkq.dtype)
    plan = Plan(order, numbers)
    grads = _decode_backward(shape, plan, grad_nd, code_nkq, None, None, None, U_Kqd, 1.0)
    (grad_U,) = _bank_backward(shape, plan, grad_nd, grads, U_Kqd, 1.0)
    return grads.code.view(n, k, q), grad_U


def _fake_decode_backward(
    grad_nd: Tensor, code_nkq: Tensor, U_Kqd: Tensor, order: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(code_nkq), torch.empty_like(U_Kqd)


_fused_decode_backward = _operator(fused_decode_backward, _fake_decode_backward)


class _FusedDecode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor, backward: bool) -> Tensor:
        update_nd, order, numbers = _fused_decode(code_nkq, U_Kqd, idx_nk, backward)
        if backward:
            ctx.save_for_backward(code_nkq, U_Kqd, order, numbers)
        return update_nd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_nd: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_fused_decode_backward(grad_nd.contiguous(), *ctx.saved_tensors), None, None


def decode(code_nkq: Tensor, U_Kqd: Tensor, idx_nk: Tensor) -> Tensor:
    dtype = _product_dtype(code_nkq)
    return _FusedDecode.apply(
        code_nkq.to(dtype).contiguous(), U_Kqd.to(dtype).contiguous(), idx_nk.int().contiguous(),
        _needs_backward(code_nkq, U_Kqd),
    )  # fmt: skip


def _needs_backward(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _product_dtype(x: Tensor) -> torch.dtype:
    """Autocast does not know our operators: do what it does for a matmul."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def apn(
    z_nd: Tensor, P_Km: Tensor, V_dr: Tensor, a_Kr: Tensor | None, b_Kr: Tensor, U_Kqd: Tensor, *, top_k: int,
    temperature: float, scale: float | Tensor, routing: str, U0_rd: Tensor | None = None,
    A_Krq: Tensor | None = None, projection_gdm: Tensor | None = None, keep_nk: Tensor | None = None,
) -> APNOutput:  # fmt: skip
    if U0_rd is not None or projection_gdm is not None or V_dr.shape[1] > MOST_RANK:
        return reference.apn(
            z_nd, P_Km, V_dr, a_Kr, b_Kr, U_Kqd, top_k=top_k, temperature=temperature, scale=scale,
            routing=routing, U0_rd=U0_rd, A_Krq=A_Krq, projection_gdm=projection_gdm, keep_nk=keep_nk,
            decode=decode if U_Kqd.shape[1] <= MOST_RANK else reference.gathered_decode,
        )  # fmt: skip
    dtype = _product_dtype(z_nd)
    update, idx, w, confidence = _Fused.apply(
        z_nd.contiguous(), P_Km.contiguous(), V_dr.to(dtype).contiguous(),
        None if a_Kr is None else a_Kr.contiguous(), b_Kr.contiguous(), U_Kqd.to(dtype).contiguous(),
        None if keep_nk is None else keep_nk.contiguous(), top_k, temperature,
        1.0 if isinstance(scale, Tensor) else float(scale), routing == "cosine", dtype,
        _needs_backward(z_nd, P_Km, V_dr, a_Kr, b_Kr, U_Kqd),
    )  # fmt: skip
    return APNOutput(scale * update if isinstance(scale, Tensor) else update, idx, w, confidence)
