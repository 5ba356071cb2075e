"""A layer and its divergence in one node."""

from bnuq_ext.ops.linear_chain import Link, bayes_linear_chain


def bayes_linear_kl(x, *posterior, stream, prior_std, **noise):
    """(y, kl)"""
    return bayes_linear_chain(x, [Link(posterior, prior_std, stream)], **noise)
