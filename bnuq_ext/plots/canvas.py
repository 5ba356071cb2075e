"""What every figure starts from: colours, a figure outside pyplot, checked values."""

import numpy as np

from ..ops.checks import refuse

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a8a8a"
# Stay apart for most colour-blind readers (after Okabe and Ito).
COLORS = "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #d55e00 #f0e442 #8a8a8a".split()


def new_figure(width: float, height: float):
    """A figure that pyplot does not know, so that it needs no closing and no display."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        requirement = "be installed (pip install 'bnuq_ext[demo]')"
        refuse("plots", "matplotlib", requirement, error, ModuleNotFoundError)
    return Figure(figsize=(width, height), layout="constrained")


def take_axes(ax):
    return new_figure(5.4, 3.6).subplots() if ax is None else ax


def take_values(op: str, name: str, values):
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or len(values) == 0:
        refuse(op, name, "have shape (N,) with N > 0", list(values.shape))
    return values
