"""Functions that torch.compile runs as they are."""

from collections.abc import Callable
from functools import wraps

import torch


def untraced(function: Callable) -> Callable:
    """The function, around which a compiled caller breaks its graph: traced, it would be compiled
    for minutes, and again for each number of rows."""

    @wraps(function)
    def call(*args, **options):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return call
