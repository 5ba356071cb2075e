"""Along which dimension lies what values have chosen: whoever asks how long that is reads values."""

import pytest
import torch
from torch import Tensor

from bnuq_ext.reads import COUNTS, Reads

N, FEATURES = 16, 8  # as many rows are chosen as each has features


def rows() -> Tensor:
    """Half of them begin with a positive number."""
    x = torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(0)).abs()
    x[::2] *= -1
    return x


def found(function) -> str:
    x = rows()
    reads = Reads([], x, N)
    with reads:
        function(x * 1, x[:, 0] > 0)
    return reads.found


def pairs(x, mask) -> Tensor:
    """(16, 2), rows and columns."""
    return mask[:, None].expand(-1, 2).nonzero()


def put_together(x, mask) -> Tensor:
    return torch.cat([x[mask], x[~mask]])


COUNTED = {
    "len": lambda x, mask: len(x[mask]),
    "iterated": lambda x, mask: [*x[mask]],
    "size": lambda x, mask: x[mask].size(-2),
    "all sizes": lambda x, mask: x[mask].size(),
    "size of columns": lambda x, mask: pairs(x, mask).T.size(dim=1),
    "numel": lambda x, mask: x[mask].numel(),
    "unbind": lambda x, mask: x[mask].unbind(),
    "unbind of columns": lambda x, mask: pairs(x, mask).mT.unbind(dim=-1),
    "an entry of columns": lambda x, mask: [*pairs(x, mask).T][0][:3],
    "part of columns": lambda x, mask: pairs(x, mask).T[:, 1:],
    "behind a number": lambda x, mask: pairs(x, mask).T[0, 1:],
    "behind an ellipsis": lambda x, mask: pairs(x, mask).T[..., :4],
    "before an ellipsis": lambda x, mask: x[mask][:4, ...],
    "behind a new dimension": lambda x, mask: pairs(x, mask).T[None, :, :4],
    "in a mask of two dimensions": lambda x, mask: pairs(x, mask).T[None][
        torch.ones(1, 2, dtype=torch.bool), 1:
    ],
    "masked columns": lambda x, mask: x.T[:, mask][:, :4],
    "masked columns by narrow": lambda x, mask: x.T[:, mask].narrow(1, 0, 4),
    "masked apart from others": lambda x, mask: x[None, None].expand(1, 3, -1, -1)[
        torch.tensor([0]), :, mask
    ][:4],
    "masked last": lambda x, mask: x.T[..., mask].tensor_split(2, -1),
    "masked behind a new dimension": lambda x, mask: x[None, mask].chunk(2, 1),
    "masked behind a number": lambda x, mask: x.T[0, mask][:4],
    "written": lambda x, mask: x.T[:, mask].__setitem__((slice(None), slice(4, None)), 0),
    "squeezed in place": lambda x, mask: x[mask][None].squeeze_(0)[:4],
    "transposed in place": lambda x, mask: pairs(x, mask).t_()[:, :4],
    "repeated": lambda x, mask: x.T.repeat_interleave(mask.long(), dim=1)[:, :4],
    "repeated along the last": lambda x, mask: torch.repeat_interleave(x.T, mask.long(), -1)[:, :4],
    "all of them by name": lambda x, mask: torch.split(tensor=x[mask], split_size_or_sections=4),
    "some of them, all by name": lambda x, mask: torch.narrow(
        input=x[mask], dim=0, start=0, length=4
    ),
    "hsplit": lambda x, mask: pairs(x, mask).T.hsplit(2),
    "hsplit of one dimension": lambda x, mask: x[mask, 0].hsplit(2),
    "vsplit": lambda x, mask: x[mask].vsplit(2),
    "dsplit": lambda x, mask: x[mask, 0][None, None].dsplit(2),
    "padded": lambda x, mask: torch.nn.functional.pad(pairs(x, mask).T, (0, 3))[:, :4],
    "put together": lambda x, mask: put_together(x, mask)[:4],
    "all": lambda x, mask: x[x[:, 0] < 9][:4],
    "the numbers of all": lambda x, mask: x.index_select(0, (x[:, 0] < 9).nonzero()[:, 0])[:4],
    "all, of as many columns": lambda x, mask: (x[:, :1] < 9).nonzero()[:4],
}
NOT_COUNTED = {
    "features": lambda x, mask: x[mask].size(1),
    "part of the features": lambda x, mask: x[mask][:, :4],
    "halves of the features": lambda x, mask: put_together(x, mask).chunk(2, -1),
    "columns": lambda x, mask: [*pairs(x, mask).T],
    "columns by unbind": lambda x, mask: pairs(x, mask).unbind(1),
    "number of columns": lambda x, mask: len(pairs(x, mask).T),
    "one of columns": lambda x, mask: pairs(x, mask).T[:1],
    "columns in place": lambda x, mask: pairs(x, mask).t_()[:1],
    "of masked columns the first": lambda x, mask: x.T[:, mask][:3],
    "of masked last the first": lambda x, mask: x.T[..., mask].split(3),
    "all of them": lambda x, mask: x[mask][:, None][:],
    "what they are written into": lambda x, mask: x.index_put((mask,), x[mask])[:4],
    "what they are added to": lambda x, mask: x.index_add_(0, mask.nonzero()[:, 0], x[mask])[:4],
    "where each is among the unique": lambda x, mask: x[:, 0].unique(return_inverse=True)[1][:4],
    "a table by their numbers": lambda x, mask: x.T[:4, mask.nonzero()[:, 0]],
    "hsplit of features": lambda x, mask: x[mask].hsplit(2),
    "squeezed in place": lambda x, mask: x[mask][None].squeeze_(0).relu(),
}


@pytest.mark.parametrize("function", COUNTED.values(), ids=COUNTED)
def test_their_number_is_asked_for(function):
    assert found(function) == COUNTS


@pytest.mark.parametrize("function", NOT_COUNTED.values(), ids=NOT_COUNTED)
def test_their_number_does_not_matter(function):
    assert found(function) == ""
