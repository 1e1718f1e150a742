"""Float64 transcription of "Attractor Patch Networks", one token at a time, as plain loops.

The variant is read off the names in `parameters`: `gate_slope` means a vector gate, `decoder` independent
decoders, `router_projection` contextual prototypes and `norm.weight` an internal LayerNorm.
"""

import math
from collections import namedtuple

import numpy as np

Forward = namedtuple("Forward", "update indices weights scores")


def layer_norm(h, weight, bias, eps=1e-5):
    """LN(h): zero mean and unit (biased) variance over the channels, then an affine map."""
    mean = sum(h) / len(h)
    spread = math.sqrt(sum((value - mean) ** 2 for value in h) / len(h) + eps)
    return np.array([(h[c] - mean) / spread * weight[c] + bias[c] for c in range(len(h))])


def inner(a, b):
    total = 0.0
    for left, right in zip(a, b, strict=True):
        total += float(left) * float(right)
    return total


def unit(v):
    """Norm(v) = v / |v|, with Norm(0) = 0."""
    length = math.sqrt(inner(v, v))
    return np.zeros(len(v)) if length == 0.0 else np.array([float(value) / length for value in v])


def similarity(x, prototype, routing):
    """<Norm(x), Norm(p)> (Algorithm 1, line 2) or <x, Norm(p)> (core definition of s_i)."""
    return inner(unit(x) if routing == "cosine" else x, unit(prototype))


def project(z, matrix):
    """M^T z for M of shape (len(z), columns)."""
    return np.array([inner(z, matrix[:, column]) for column in range(matrix.shape[1])])


def routing_scores(z, parameters, routing, temperature):
    """s_i for i = 1..K; "Contextual prototypes": scored in the subspace of each group, then averaged."""
    projection = parameters.get("router_projection")
    scores = []
    for prototype in parameters["prototypes"]:
        if projection is None:
            scores.append(similarity(z, prototype, routing) / temperature)
            continue
        groups, wide, narrow = projection.shape
        total = 0.0
        for g in range(groups):
            x = project(z[g * wide : (g + 1) * wide], projection[g])
            total += similarity(x, prototype[g * narrow : (g + 1) * narrow], routing)
        scores.append(total / groups / temperature)
    return scores


def top_k(scores, k):
    """TopK(s, k) in descending order (Algorithm 1, line 3); the lower index wins a tie."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def softmax(scores, keep=None):
    """Softmax over the kept entries (Algorithm 1, line 4); the others get 0 (patch dropout)."""
    keep = [True] * len(scores) if keep is None else keep
    top = max(s for s, kept in zip(scores, keep, strict=True) if kept)
    powers = [math.exp(s - top) if kept else 0.0 for s, kept in zip(scores, keep, strict=True)]
    return [power / sum(powers) for power in powers]


def sigmoid(t):
    return 1.0 / (1.0 + math.exp(-t)) if t >= 0 else math.exp(t) / (1.0 + math.exp(t))


def gate(u, parameters, i):
    """sigma(a_i * u + b_i), or sigma(b_i) with one scalar per patch ("Diagonal gating")."""
    bias = parameters["gate_bias"][i]
    if "gate_slope" not in parameters:
        return [sigmoid(float(bias[0]))] * len(u)
    slope = parameters["gate_slope"][i]
    return [sigmoid(float(slope[j]) * float(u[j]) + float(bias[j])) for j in range(len(u))]


def features(u, parameters, i):
    """phi_i = u * gate_i (Algorithm 1, line 8)."""
    return np.array([float(value) * g for value, g in zip(u, gate(u, parameters, i), strict=True)])


def decoder(parameters, i):
    """U_i^T, shape (r, d): stored whole, or U_0^T + A_i B_i ("Shared decoders with patch offsets")."""
    if "decoder" in parameters:
        return parameters["decoder"][i]
    rows = parameters["decoder_base"].copy()
    for row in range(len(rows)):
        rows[row] += project(parameters["offset_in"][i][row], parameters["offset_out"][i])
    return rows


def apn(h, parameters, k, temperature, scale=1.0, routing="cosine", keep=None):
    """Algorithm 1 for one token, without the residual: gamma * sum_i w_i U_i phi_i."""
    z = h
    if "norm.weight" in parameters:
        z = layer_norm(h, parameters["norm.weight"], parameters["norm.bias"])
    scores = routing_scores(z, parameters, routing, temperature)
    indices = top_k(scores, k)
    weights = softmax([scores[i] for i in indices], keep)
    u = project(z, parameters["encoder"])
    update = np.zeros(len(h))
    for w, i in zip(weights, indices, strict=True):
        update += w * project(features(u, parameters, i), decoder(parameters, i))
    return Forward(scale * update, indices, weights, scores)


def balance(scores_of_tokens):
    """L_bal = sum_i (u_hat_i - 1/K)^2, u_hat the mean over tokens of the softmax over all K scores."""
    patches = len(scores_of_tokens[0])
    utilization = [0.0] * patches
    for scores in scores_of_tokens:
        for i, share in enumerate(softmax(scores)):
            utilization[i] += share / len(scores_of_tokens)
    return sum((share - 1.0 / patches) ** 2 for share in utilization)


def weight_entropy(weights_of_tokens):
    """Mean over tokens of the entropy of w(h), with 0 log 0 = 0 ("Regularizers for routing diversity")."""
    entropies = [-sum(w * math.log(w) for w in weights if w > 0.0) for weights in weights_of_tokens]
    return sum(entropies) / len(entropies)


def usage(active_sets, num_patches):
    """q_i: the share of all selections in a batch that went to patch i ("Patch usage entropy")."""
    selections = [i for active in active_sets for i in active]
    return [selections.count(i) / len(selections) for i in range(num_patches)]


def usage_entropy(q, eps=1e-12):
    """H(q) = -sum_i q_i log(q_i + eps)."""
    return -sum(share * math.log(share + eps) for share in q)


def overlap(active, other):
    """|K(h) & K(h')|."""
    return len(set(active) & set(other))


def batch_overlaps(active_sets):
    """Intersection sizes over all ordered pairs of distinct tokens ("Overlap statistics")."""
    tokens = range(len(active_sets))
    return [overlap(active_sets[a], active_sets[b]) for a in tokens for b in tokens if a != b]


def mean_overlap(active_sets):
    sizes = batch_overlaps(active_sets)
    return sum(sizes) / len(sizes)


def overlap_histogram(active_sets, k):
    """Share of the pairs whose active sets have 0, 1, ..., k patches in common."""
    sizes = batch_overlaps(active_sets)
    return [sizes.count(size) / len(sizes) for size in range(k + 1)]


def expected_overlap(sets_a, sets_b):
    """Omega(A, B) = E |K(h) & K(h')| over h in A and h' in B ("Interference proposition")."""
    sizes = [overlap(active, other) for active in sets_a for other in sets_b]
    return sum(sizes) / len(sizes)


def overlap_score(sets_a, sets_b, k):
    """Omega(A, B) / k ("Interference proxy via patch overlap")."""
    return expected_overlap(sets_a, sets_b) / k


def parameter_shapes(
    dim,
    num_patches,
    rank,
    gate="vector",
    decoder="independent",
    prototypes="static",
    layer_norm=False,
    routing_dim=None,
    routing_groups=1,
    offset_rank=None,
):
    """Learned arrays of a layer, by name ("Capacity at fixed parameter budget" and "Practical Variants")."""
    shapes = {"prototypes": (num_patches, dim), "encoder": (dim, rank), "gate_bias": (num_patches, 1)}
    if prototypes == "contextual":
        shapes["prototypes"] = (num_patches, routing_dim)
        shapes["router_projection"] = (routing_groups, dim // routing_groups, routing_dim // routing_groups)
    if gate == "vector":
        shapes["gate_slope"] = shapes["gate_bias"] = (num_patches, rank)
    if decoder == "independent":
        shapes["decoder"] = (num_patches, rank, dim)
    else:
        shapes["decoder_base"] = (rank, dim)
        shapes["offset_in"] = (num_patches, rank, offset_rank)
        shapes["offset_out"] = (num_patches, offset_rank, dim)
    if layer_norm:
        shapes["norm.weight"] = shapes["norm.bias"] = (dim,)
    return shapes


def parameter_count(*sizes, **variant):
    return sum(math.prod(shape) for shape in parameter_shapes(*sizes, **variant).values())


def multiply_adds(dim, num_patches, k, rank):
    """Per token, static independent variant: routing scores, code, k decoders."""
    return dim * num_patches + dim * rank + k * dim * rank


def dense_multiply_adds(dim):
    """Per token, the FFN with d_ff = 4d: W_1 h and W_2 sigma(W_1 h)."""
    return 2 * dim * (4 * dim)
