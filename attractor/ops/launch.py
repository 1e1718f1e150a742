"""Sizes, plans and launches of the fused backend's kernels. Shape suffixes as in reference.py."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attractor.ops.tapes import Taped

SEGMENT, LONG_SEGMENT = 512, 2048
"""Pairs of one patch that one program adds up for the patch's gradients: more where patches are `busy`."""
SPAN = 64
"""Pairs of one patch that one program adds up where patches are so many that most have one or none."""
CHUNK = 64
"""Pairs that one program of the counting sort places."""
LITTLE = 160_000
"""Bytes of shared memory that a block has on A100, H100 and later, and on smaller GPUs not."""
DENSE_PATCHES, DENSE_TYPES = 256, (torch.bfloat16,)
"""Up to so many patches, a product with all prototypes takes less time than gathering the selected ones."""
TRIED: dict[str, dict[str, int]] = {}
"""Sizes of kernels, by name, instead of those that are chosen: for benchmarks/tune.py."""


@lru_cache
def triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def little_shared_memory() -> bool:
    """Whether blocks have little shared memory: tiles are then smaller, and fewer of them wait."""
    return torch.cuda.is_initialized() and _has_little(torch.cuda.current_device())


@lru_cache
def _has_little(device: int) -> bool:
    properties = torch.cuda.get_device_properties(device)
    # not every build of torch knows the larger figure
    most = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return most < LITTLE


def power(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())


def aligned(count: int) -> int:
    """Numbers of 4 bytes, with those that lie unused before the next tensor in the same memory."""
    return -(-count // 64) * 64


def _on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, whatever device its tensors are on."""

    def guarded(first: Tensor, *rest: Any) -> Any:
        if first.device.index == torch.cuda.current_device():
            return run(first, *rest)
        with torch.cuda.device(first.device):
            return run(first, *rest)

    return guarded


def operator(run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, and an operator of it that torch.compile calls and does not look into.

    `fake` makes empty outputs, of those arguments of `run` that it has by the same name. This is what
    torch.library.custom_op does, without its check of every call for aliasing, which took longer than the
    launches. Where no one watches operators, `run` is called as it is.
    """
    name = f"attractor::{run.__name__}"
    on_gpu = _on_its_device(run)
    every = list(inspect.signature(run).parameters)
    places = [every.index(argument) for argument in inspect.signature(fake).parameters]
    torch.library.define(name, torch.library.infer_schema(run, mutates_args=()))
    taped = Taped(run, torch.get_float32_matmul_precision)

    def on_cuda(first: Tensor, *rest: Any) -> Any:
        """Also for what torch.compile makes, which calls the operator that is registered."""
        other = first.get_device() != torch.cuda.current_device()
        if TRIED or other or torch._C._len_torch_dispatch_stack() > 0:
            return on_gpu(first, *rest)
        return taped(first, *rest)

    torch.library.impl(name, "cpu", run)
    torch.library.impl(name, "cuda", on_cuda)
    torch.library.register_fake(name, lambda *given: fake(*(given[place] for place in places)))
    registered = getattr(torch.ops.attractor, run.__name__).default

    def call(first: Tensor, *rest: Any) -> Any:
        watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        if watched or type(first) not in (Tensor, torch.nn.Parameter) or not first.is_cuda:
            return registered(first, *rest)
        return on_cuda(first, *rest)

    return call


def wants_graph() -> bool:
    """create_graph=True: our gradients will be differentiated, which the kernels cannot do."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def product_dtype(x: Tensor) -> torch.dtype:
    """Autocast does not know our operators: do what it does for a matmul."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def needs_backward(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def lengths(
    z_nd: Tensor, P_Km: Tensor, inverse_z_n: Tensor, inverse_p_K: Tensor, histogram: Tensor | None = None
) -> None:
    """One over the lengths of tokens and prototypes: what routing reads. Clears `histogram`."""
    from attractor.ops import kernels

    (n, d), (K, m) = z_nd.shape, P_Km.shape
    D_P, M_P = power(d, 16), power(m, 16)
    BN, BC = max(1, 4096 // D_P), 8192
    counters = 0 if histogram is None else histogram.numel()
    kernels.lengths[(-(-n // BN) + -(-K // BN) + -(-counters // BC),)](
        z_nd,
        P_Km,
        inverse_z_n,
        inverse_p_K,
        histogram,
        n,
        counters,
        D=d,
        K=K,
        M=m,
        D_P=D_P,
        M_P=M_P,
        BN=BN,
        BC=BC,
        COUNT=histogram is not None,
    )


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
        pairs = self.n * self.k // self.K
        return 16 if pairs <= 16 else 32 if pairs <= 32 else 64  # so that torch.compile needs few guards

    @property
    def busy(self) -> bool:
        """Whether patches have many pairs each, and there are so many in all that long segments suffice."""
        pairs = self.n * self.k
        return self.dense and pairs >= 256 * SEGMENT and pairs >= SEGMENT * self.K

    @property
    def segment(self) -> int:
        if "plan" in TRIED:
            return TRIED["plan"]["SEGMENT"]
        return LONG_SEGMENT if self.busy else SEGMENT

    @property
    def dense(self) -> bool:
        """Whether gradients reach tokens and prototypes through a product with all prototypes."""
        return self.K <= DENSE_PATCHES and self.dtype in DENSE_TYPES

    @property
    def width(self) -> int:
        """Of what `token_products` multiplies with the tokens."""
        return self.r + (self.K if self.dense else 0)

    @property
    def apart(self) -> bool:
        """Whether the gradients of gates are a kernel of their own: less time where codes are wide."""
        if "gate_backward" in TRIED or "decode_backward" in TRIED:
            return "gate_backward" in TRIED
        return self.measured and self.dense and self.r > 32

    @property
    def measured(self) -> bool:
        """Whether sizes were tried with shapes like this one."""
        return self.dtype in DENSE_TYPES and self.r <= 128 and self.d > 256 and self.n >= 4096

    @property
    def most_tiles(self) -> int:
        return -(-self.n * self.k // self.tile) + min(self.K, self.n * self.k)

    @property
    def most_segments(self) -> int:
        return -(-self.n * self.k // self.segment) + min(self.K, self.n * self.k)

    @property
    def most_parts(self) -> int:
        """Segments of patches with more than one: at most twice as many as full ones."""
        return 2 * (self.n * self.k // self.segment) + 1

    def sizes(self) -> dict[str, int]:
        return {"D": self.d, "R": self.r, "R_P": power(self.r, 16)}

    def dots(self) -> dict[str, Any]:
        exact = torch.get_float32_matmul_precision() == "highest"
        return {"DTYPE": triton_type(self.dtype), "PRECISION": "ieee" if exact else "tf32"}

    def blocks(self, kernel: str, usual: bool = True) -> dict[str, int]:
        """Block sizes, warps and pipeline stages of a kernel, tuned on an H200 (docs/performance.md).

        It is not `usual` if the kernel is given something else than where it was tuned, such as float32
        tokens under autocast.
        """
        chosen = self._blocks(kernel, usual, little_shared_memory())
        return chosen | TRIED[kernel] if kernel in TRIED else chosen

    @lru_cache(4096)  # noqa: B019  a shape is a few numbers
    def _blocks(self, kernel: str, usual: bool, little: bool) -> dict[str, int]:
        small, many = self.r <= 64, self.K > DENSE_PATCHES
        programs = 132  # about one wave of a large GPU
        narrow = little + (not usual) if self.dense else 0  # a tile then has all prototypes
        chosen = {
            "route": {
                "BN": 16 if self.n < 24 * programs else 64 if many or self.n < 96 * programs else 128,
                "BK": 128 if many else 256,
                "BD": 64,
                "num_warps": 4 if many and self.r <= 128 else 8,
                "num_stages": 3 if self.r <= 128 else 2,  # three tiles of a wide code do not fit
            },
            "decode": {"BD": 64, "num_warps": 4 if small else 8, "num_stages": 3},
            "combine": {"BN": 8, "BD": 128, "num_warps": 4},
            "place": {"num_warps": 1},
            "few_scores": {"BK": max(2, min(32, 16384 // power(self.d))), "num_warps": 4},
            "few_tokens": {"BD": 64, "num_warps": 4},
            "decode_backward": {"BD": 64, "num_warps": 4 if small else 8, "num_stages": 4 if small else 3},
            "pair_products": {"BM": 64, "BD": 64, "num_warps": 4, "num_stages": 3},
            "gate_backward": {"BR": 16, "num_warps": 2},
            "code_backward": {"num_warps": 1},
            "token_backward": {"BN": 16, "BD": 128 >> narrow, "num_warps": 4, "num_stages": 2},
            "bank_backward": {"BM": 64, "BD": 128, "num_warps": 4, "num_stages": 3},
            "token_products": {"BN": 64, "BD": 128, "num_warps": 4, "num_stages": 3},
            "sum_parts": {"BD": 128, "BT": 16, "num_warps": 4},
        }[kernel]
        # tiles are as wide as the code: of a wide one, smaller and fewer fit into shared memory
        code_bytes = power(self.r, 16) * self.dtype.itemsize
        crowded = max(1, code_bytes // (256 if little else 512))
        if "num_stages" in chosen and (little or crowded > 1):
            smaller = {name: max(16, chosen[name] // crowded) for name in ("BD", "BN") if name in chosen}
            chosen = chosen | smaller | {"num_stages": 2}
        if kernel == "route" and not usual:  # float32 tiles, and two bfloat16 ones of each
            chosen = chosen | {"BD": 32, "num_stages": 2}
        if self.measured and not little:
            measured = self._measured_of_many if many else self._measured
            chosen = chosen | measured(kernel, usual)
        return chosen | {"BD": min(chosen["BD"], power(self.d, 16))} if "BD" in chosen else chosen

    def _measured(self, kernel: str, usual: bool) -> dict[str, int]:
        """What was best in results/tune-h200.json, for shapes like those; the others keep what they had."""
        wide = self.r > 64 and self.K > 128
        tokens = {"BN": 64, "BD": 32 if wide else 64} if self.n >= 16384 else {}
        if not usual:  # float32 tokens
            return {
                "route": {"num_stages": 3},
                "token_backward": tokens,
                "token_products": {"BN": 32, "num_stages": 5},
            }.get(kernel, {})
        return {
            "combine": {"BN": 2, "BD": 512},
            "pair_products": {"BM": 128, "num_warps": 8} if self.busy else {},
            "gate_backward": {"BR": 8, "num_warps": 1} if self.busy else {},
            "token_backward": tokens,
            "bank_backward": {
                "BM": 32,
                "BD": 256 if 32 < self.r <= 64 and self.d % 256 == 0 else 128,
                "num_stages": 2 if self.r <= 32 else 3 if self.r <= 64 else 5,
            },
            # how much would blocks of 128 compute in vain?
            "token_products": {
                "BW": 64 if 4 * 128 * -(-self.width // 128) > 5 * self.width else 128,
                "num_stages": 5,
            },
        }.get(kernel, {})

    def _measured_of_many(self, kernel: str, usual: bool) -> dict[str, int]:
        """The same where patches are many, and perhaps few pairs have one."""
        if not usual or self.r > 64:
            return {}
        few = self.tile == 16
        return {
            "combine": {"BN": 2, "BD": 512},
            "decode": {"num_stages": 4},
            "decode_backward": {"num_warps": 1 if few else 2},
            "bank_backward": {"BM": 16, "BD": 64, "num_warps": 1, "num_stages": 3},
            "token_products": {"BD": 64, "num_stages": 5},
        }.get(kernel, {})


class Plan(NamedTuple):
    """Pairs in the order of their patches, and the numbers kernels.py describes."""

    order: Tensor
    numbers: Tensor

    @classmethod
    def empty(cls, shape: Shape, device: torch.device) -> "Plan":
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in cls.sizes(shape)))

    @staticmethod
    def sizes(shape: Shape) -> tuple[int, int]:
        return shape.n * shape.k, 5 * shape.K + 2 + shape.most_segments + shape.most_tiles

    def make(self, shape: Shape, idx_nk: Tensor, histogram: Tensor) -> None:
        from attractor.ops import kernels

        K, pairs = shape.K, shape.n * shape.k
        chunks = histogram.shape[1]
        block = min(4096, power(chunks, 16))
        rows = min(4096 // block, power(K))
        kernels.scan_chunks[(-(-K // rows),)](histogram, self.numbers, chunks, K=K, BC=block, BK=rows)
        kernels.make_plan[(1,)](
            self.numbers,
            shape.most_segments,
            K=K,
            SEGMENT=shape.segment,
            BK=min(1024, power(K)),
            BM=shape.tile,
        )
        kernels.place[(chunks,)](
            idx_nk, histogram, self.numbers, self.order, pairs, K=K, **shape.blocks("place")
        )


def empty_histogram(shape: Shape, device: torch.device) -> Tensor:
    return torch.empty(shape.K, -(-shape.n * shape.k // CHUNK), dtype=torch.int32, device=device)


def gate_kind(a_Kr: Tensor | None, b_Kr: Tensor | None) -> int:
    return 0 if b_Kr is None else 1 if a_Kr is None else 2


def decode(
    shape: Shape,
    plan: Plan,
    u: Tensor,
    w: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    U_Krd: Tensor,
    idx_nk: Tensor,
    confidence_n: Tensor | None,
    update_nd: Tensor,
    scale: float,
) -> None:
    """Eqs. (5) and (6) from a plan: every tile of pairs, then the sum over the slots.

    `confidence_n` is given with radii, where an index of -1 does not say that a token was not finite.
    """
    from attractor.ops import kernels

    n, d, k = shape.n, shape.d, shape.k
    y_pd = torch.empty(n * k, d, dtype=shape.dtype, device=u.device)
    kernels.decode[(shape.most_tiles,)](
        u,
        w,
        a,
        b,
        U_Krd,
        *plan,
        y_pd,
        shape.most_segments,
        K=shape.K,
        k=k,
        BM=shape.tile,
        GATE=gate_kind(a, b),
        **shape.sizes(),
        **shape.dots(),
        **shape.blocks("decode"),
    )
    blocks = shape.blocks("combine")
    kernels.combine[(-(-n // blocks["BN"]), -(-d // blocks["BD"]))](
        y_pd,
        idx_nk,
        confidence_n,
        update_nd,
        n,
        scale,
        D=d,
        k=k,
        HAS_RADIUS=confidence_n is not None,
        **blocks,
    )


def decode_few(
    shape: Shape,
    scores: Tensor | None,
    u: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    U_Krd: Tensor,
    idx_nk: Tensor,
    w_nk: Tensor | None,
    confidence_n: Tensor | None,
    update_nd: Tensor,
    scale: float,
    has_radius: bool = False,
) -> None:
    from attractor.ops import kernels

    blocks = shape.blocks("few_tokens")
    kernels.few_tokens[(shape.n, -(-shape.d // blocks["BD"]))](
        scores,
        u,
        a,
        b,
        U_Krd,
        idx_nk,
        w_nk,
        confidence_n,
        update_nd,
        scale,
        K=shape.K,
        K_P=power(shape.K, 2),
        k=shape.k,
        k_P=power(shape.k, 2),
        GATE=gate_kind(a, b),
        HAS_RADIUS=has_radius,
        **shape.sizes(),
        **blocks,
    )


class PairGradients(NamedTuple):
    code: Tensor | None  # of each pair's code: of u, or of the codes that were given; None if they are summed
    weight: Tensor | None
    slope_parts: Tensor | None  # one row per tile
    bias_parts: Tensor | None
    codes: Tensor  # not a gradient: w phi of each pair, or the codes that were given


def decode_backward(
    shape: Shape,
    plan: Plan,
    grad_nd: Tensor,
    u: Tensor,
    w: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    U_Krd: Tensor,
    scale: float,
    whole: bool = True,
) -> PairGradients:
    """With `whole=False` only `codes`, which the gradients of decoders need."""
    from attractor.ops import kernels

    kind, pairs, tiles = gate_kind(a, b), shape.n * shape.k, shape.most_tiles

    def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=u.device)

    grads = PairGradients(
        new(pairs, shape.r, dtype=shape.dtype),
        new(pairs) if kind else None,
        new(tiles, shape.r) if kind == 2 else None,
        new(tiles, shape.r if kind == 2 else 1) if kind else None,
        new(pairs, shape.r, dtype=shape.dtype) if kind else u,
    )
    if not whole and not kind:
        return grads
    kernels.decode_backward[(tiles,)](
        grad_nd,
        u,
        w,
        a,
        b,
        U_Krd,
        *plan,
        grads.codes,
        *grads[:4],
        shape.most_segments,
        scale,
        K=shape.K,
        k=shape.k,
        BM=shape.tile,
        GATE=kind,
        WHOLE=whole,
        **shape.sizes(),
        **shape.dots(),
        **shape.blocks("decode_backward", kind > 0),
    )
    return grads


def apart_backward(
    shape: Shape,
    plan: Plan,
    grad_nd: Tensor,
    u: Tensor,
    w: Tensor,
    a: Tensor | None,
    b: Tensor,
    U_Krd: Tensor,
    scale: float,
    idx_nk: Tensor,
    sides_nw: Tensor | None,
    wants_bank: bool,
) -> PairGradients:
    """`decode_backward` in kernels of their own, and the sums of the codes' gradients in `sides_nw`."""
    from attractor.ops import kernels

    kind, tiles = gate_kind(a, b), shape.most_tiles
    of_code = {"R": shape.r, "R_P": power(shape.r, 16), "k": shape.k, "GATE": kind}
    products = torch.empty(shape.n * shape.k, shape.r, dtype=shape.dtype, device=u.device)
    grads = PairGradients(
        None,
        None if sides_nw is None else torch.empty_like(w),
        torch.empty(tiles, shape.r, device=u.device) if kind == 2 else None,
        torch.empty(tiles, shape.r if kind == 2 else 1, device=u.device),
        products,
    )
    blocks = shape.blocks("pair_products")
    kernels.pair_products[(-(-shape.segment // blocks["BM"]), shape.most_segments)](
        grad_nd,
        U_Krd,
        *plan,
        products,
        scale,
        K=shape.K,
        k=shape.k,
        SEGMENT=shape.segment,
        **shape.sizes(),
        **shape.dots(),
        **blocks,
    )
    if sides_nw is not None:
        kernels.code_backward[(shape.n,)](
            u,
            w,
            a,
            b,
            idx_nk,
            products,
            sides_nw,
            grads.weight,
            W=shape.width,
            k_P=power(shape.k, 2),
            **of_code,
            **shape.blocks("code_backward"),
        )
    if wants_bank:
        kernels.gate_backward[(tiles,)](
            u,
            w,
            a,
            b,
            *plan,
            products,
            grads.slope_parts,
            grads.bias_parts,
            shape.most_segments,
            K=shape.K,
            BM=shape.tile,
            **of_code,
            **shape.blocks("gate_backward"),
        )
    return grads


def bank_backward(
    shape: Shape,
    plan: Plan,
    grad_nd: Tensor,
    grads: PairGradients,
    U_Krd: Tensor,
    scale: float,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *prototypes: Tensor,
    master: torch.dtype | None = None,
    wants_gates: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients with one row per patch: decoders and, if they are given, prototypes, biases, slopes.

    `prototypes` are none, or tokens, prototypes, scores, their gradients and coefficients, inverse lengths.
    """
    z, P, s, grad_s, coefficient, inverse_p = prototypes or [None] * 6
    from attractor.ops import kernels

    kind, last = gate_kind(a, b), shape.blocks("sum_parts")
    blocks = shape.blocks("bank_backward", kind > 0)
    of_patch = {"K": shape.K, "SEGMENT": shape.segment, "HAS_P": P is not None}
    gates = (b, a) if wants_gates else (None, None)
    grad_U = torch.empty_like(U_Krd, dtype=master)
    grad_P, grad_b, grad_a = (None if x is None else torch.empty_like(x) for x in (P, *gates))
    part_U = torch.empty(shape.most_parts, shape.r * shape.d, device=U_Krd.device)
    part_P = None if P is None else torch.empty(shape.most_parts, shape.d, device=U_Krd.device)
    part_radial = None if P is None else torch.empty(shape.most_parts, device=U_Krd.device)
    kernels.bank_backward[(shape.most_segments, -(-shape.d // blocks["BD"]))](
        grad_nd,
        z,
        P,
        grads.codes,
        s,
        grad_s,
        coefficient,
        inverse_p,
        *plan,
        grad_U,
        grad_P,
        part_U,
        part_P,
        part_radial,
        scale,
        k=shape.k,
        BY_PAIR=kind == 0 or grads.code is None,
        **of_patch,
        **shape.sizes(),
        **shape.dots(),
        **blocks,
    )
    kernels.sum_parts[(shape.K, -(-shape.d // last["BD"]))](
        P,
        inverse_p,
        plan.numbers,
        part_U,
        part_P,
        part_radial,
        grads.slope_parts,
        grads.bias_parts,
        grad_U,
        grad_P,
        grad_a,
        grad_b,
        BM=shape.tile,
        GATE=kind if wants_gates else 0,
        **of_patch,
        **shape.sizes(),
        **last,
    )
    return grad_U, grad_P, grad_b, grad_a


def token_products(
    shape: Shape,
    z_nd: Tensor,
    inverse_z_n: Tensor,
    sides_nw: Tensor,
    grad_V_dr: Tensor,
    P: Tensor | None = None,
    inverse_p: Tensor | None = None,
    grad_P: Tensor | None = None,
) -> None:
    """Gradients that are sums over all tokens: of the encoder and, where `sides_nw` has them, prototypes."""
    from attractor.ops import kernels

    (n, d), W = z_nd.shape, sides_nw.shape[1]
    sized = shape if shape.width == W else shape._replace(n=0)  # product prototypes were not tried
    blocks = {"BW": min(128, power(W, 16))} | sized.blocks("token_products", z_nd.dtype == shape.dtype)
    grid = -(-W // blocks["BW"]), -(-d // blocks["BD"])
    num_parts = max(1, min(-(-n // blocks["BN"]), 264 // (grid[0] * grid[1])))
    parts = torch.empty(num_parts, W, d, device=z_nd.device)
    kernels.token_products[(*grid, num_parts)](
        z_nd, sides_nw, inverse_z_n, parts, n, D=d, W=W, **shape.dots(), **blocks
    )
    D_P = power(d, 16)
    kernels.add_products[(W,)](
        P,
        inverse_p,
        parts,
        grad_V_dr,
        grad_P,
        num_parts,
        D=d,
        D_P=D_P,
        R=shape.r,
        W=W,
        BP=max(1, 4096 // D_P),
    )
