"""The Bayesian ops in plain PyTorch, fed with the noise itself: what the tests believe.

Imports nothing of this package. Arithmetic follows the dtype of the inputs; the tests use float64.
"""

import math

import torch
from torch.distributions import Normal, kl_divergence


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
