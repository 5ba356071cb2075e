"""Every op in plain PyTorch and numpy, one line of mathematics at a time: what the tests believe.

Imports nothing of this package. Arithmetic follows the dtype of the inputs; the tests use float64.
"""

import math

import numpy as np
import torch
from torch.distributions import Normal, kl_divergence

TAGS = {"weight": 0, "bias": 1, "mean": 2, "spread": 3, "permutation": 4, "joint": 5, "local": 6}


def batch_norm(
    x,
    mean_t,
    var_t,
    weight=None,
    bias=None,
    eps=1e-5,
    residual=None,
    activation="none",
    slope=0.01,
    shared=False,
):
    """y[t] = act((x[t] - mean[t]) / sqrt(var[t] + eps) * weight + bias + residual[t]).

    Args:
        x, residual: (N, C, *) if shared, else (T*N, C, *).
        mean_t, var_t: (T, C).

    Returns:
        (T*N, C, *).
    """
    T, C = mean_t.shape
    per_channel = (1, C, *[1] * (x.dim() - 2))
    ys = []
    for t in range(T):
        rows = slice(None) if shared else slice(t * (len(x) // T), (t + 1) * (len(x) // T))
        y = (x[rows] - mean_t[t].view(per_channel)) / (var_t[t].view(per_channel) + eps).sqrt()
        y = y if weight is None else y * weight.view(per_channel)
        y = y if bias is None else y + bias.view(per_channel)
        y = y if residual is None else y + residual[rows]
        ys.append(activate(y, activation, slope))
    return torch.cat(ys)


def activate(y, activation, slope=0.01):
    return {
        "none": lambda: y,
        "relu": lambda: torch.relu(y),
        "leaky_relu": lambda: torch.nn.functional.leaky_relu(y, slope),
    }[activation]()


def fitted_moments(params, z_mean, z_spread, family):
    """Mean and variance of each replica, both (T, C), from params (4, C) and noise (T, C)."""
    mean = params[0] + params[1] * z_mean
    spread = params[2] + params[3] * z_spread
    spread = spread.exp() if family == "lognormal" else torch.maximum(spread, params[2] / 8)
    return mean, spread**2


def predictive_statistics(logits):
    """Mean (N, K, *), variance (N, K, *), entropy (N, *), expected entropy (N, *) of
    (T, N, K, *)."""
    p = logits.softmax(2)
    mean = p.mean(0)
    return mean, (p - mean).square().mean(0), _entropy(mean, 1), _entropy(p, 2).mean(0)


def _entropy(p, dim):
    return -torch.xlogy(p, p).sum(dim)


def softplus(rho):
    return torch.logaddexp(rho, torch.zeros_like(rho))


def bayes_linear(x, mu, rho, bias_mu, bias_rho, eps, bias_eps):
    """y[t] = x[t] @ (mu + softplus(rho) * eps[t])^T + bias_mu + softplus(bias_rho) * bias_eps[t].

    Args:
        x: (N, I) or (T, N, I).
        eps: (T, O, I).
        bias_eps: (T, O), or None without a bias.

    Returns:
        (T, N, O).
    """
    y = torch.einsum(
        "...ni,toi->tno" if x.dim() == 2 else "tni,toi->tno", x, mu + softplus(rho) * eps
    )
    return y if bias_mu is None else y + (bias_mu + softplus(bias_rho) * bias_eps)[:, None]


def gaussian_kl(mu, rho, prior_std):
    prior = Normal(torch.zeros_like(mu), torch.full_like(mu, prior_std))
    return kl_divergence(Normal(mu, softplus(rho)), prior).sum()


def mixture_kl(mu, rho, eps, pi, std1, std2):
    """Mean over the leading dimension of eps of sum log q(w) - log p(w)."""
    sigma = softplus(rho)
    w = mu + sigma * eps
    log_q = Normal(mu, sigma).log_prob(w)
    terms = [
        math.log(share) + Normal(torch.zeros_like(w), torch.full_like(w, std)).log_prob(w)
        for share, std in ((pi, std1), (1 - pi, std2))
        if share > 0
    ]
    log_p = torch.logsumexp(torch.stack(terms), 0)
    return (log_q - log_p).sum() / len(eps)


def philox(key, counter):
    """Philox4x32-10: two key words, four counter words (arrays broadcast), four words out."""
    k0, k1 = (np.asarray(k, dtype=np.uint64) for k in key)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in counter))
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & low  # fmt: skip
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def _halves(value):
    """Low and high 32 bits of integers, negative ones in two's complement."""
    bits = np.asarray(value, dtype=np.int64).view(np.uint64)
    return bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)


def words(key, stream, tag, replica, index):
    """The four words of (key, stream, tag, replica, index); replica and index may be arrays."""
    sub = philox(_halves(key), (stream, TAGS[tag], 0, 0))
    return philox((sub[0], sub[1]), (*_halves(index), *_halves(replica)))


def normal_pairs(w):
    """The two normals of each 32-bit word, float64, on a new last axis."""
    u = (w | np.uint32(1)).astype(np.float32).astype(np.float64) * 2.0**-32
    theta = ((w & np.uint32(0x1FFE)) | np.uint32(1)) * (2 * np.pi / 8192)
    radius = np.sqrt(-2 * np.log(u))
    return np.stack([radius * np.cos(theta), radius * np.sin(theta)], axis=-1)


def vector_normals(key, first_replica, stream, tag, shape):
    """(T, C): element c is normal c % 8 of the eight at index c // 8."""
    T, C = shape
    replica, index = np.arange(T)[:, None] + first_replica, np.arange((C + 7) // 8)[None, :]
    z = normal_pairs(words(key, stream, tag, replica, index))
    return torch.from_numpy(z.reshape(T, -1)[:, :C].copy())


def weight_normals(key, first_replica, stream, tag, shape):
    """(T, O, I) in the order of the A fragments of mma.m16n8k16.

    Weight (o, i) is in tile (o // 16, i // 16), at lane 4 (o % 8) + (i % 8) // 2, and is normal i %
    2 + 2 (o % 16 // 8) + 4 (i % 16 // 8) of the eight of index 2^32 (o // 16) + 32
    (i // 16) + lane.
    """
    T, O, I = shape  # noqa: E741
    o, i = np.arange(O)[:, None], np.arange(I)[None, :]
    lane = 4 * (o % 8) + (i % 8) // 2
    slot = i % 2 + 2 * (o % 16 // 8) + 4 * (i % 16 // 8)
    index = (o // 16 << 32) + 32 * (i // 16) + lane
    replica = np.arange(T)[:, None, None] + first_replica
    z = normal_pairs(words(key, stream, tag, replica, index[None])).reshape(T, O, I, 8)
    return torch.from_numpy(np.take_along_axis(z, slot[None, :, :, None] + 0 * z[..., :1].astype(int), -1)[..., 0])  # fmt: skip


def snapshot_indices(key, first_replica, num_snapshots, num_samples):
    """(T,): perm_e(t mod B), e = t // B, by 24 rounds of the swap-or-not shuffle."""
    t = np.arange(num_samples) + first_replica
    epoch, x = t // num_snapshots, (t % num_snapshots).astype(np.int64)
    for round_ in range(24):
        pivots = words(key, 0, "permutation", epoch, ((round_ // 4 * 4) << 32) + 0xFFFFFFFF)
        pivot = (pivots[..., round_ % 4].astype(np.int64) * num_snapshots) >> 32
        partner = (pivot - x) % num_snapshots
        larger = np.maximum(x, partner)
        coin = words(key, 0, "permutation", epoch, (round_ << 32) + larger)[..., 0] & 1
        x = np.where(coin == 1, partner, x)
    return torch.from_numpy(x)
