"""bnuq_ext: fast predictive distributions from batch normalisation."""

from . import ops as ops
