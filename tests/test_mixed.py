"""What a forward makes of the rows of all replicas shows in the sizes of its operations,
whatever the values of a trial are."""

import copy
import warnings

import pytest
import torch
from coupled import ROWS, D, K, Norms
from folded import assert_goes_as_the_loop, prepared, samples, way
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from training import Net as BayesianNet
from training import assert_right, ways

import bnuq_ext as bnuq


class Between(Norms):
    """A function between its two layers."""

    def __init__(self, between):
        super().__init__()
        self.between = between

    def forward(self, x):
        return self.head(self.second(self.between(self.first(x))))


def assert_folds(make):
    model = prepared(make, ROWS)
    assert_goes_as_the_loop(model, ROWS[:6])
    assert way(model) == "folded"


def written(h):
    """A part of what a forward makes, by way of another name."""
    part = h.clone()
    name = part[:, :1]
    name.mul_(1 + (h.amax() > 1e6))
    return part


def given_a_place(h):
    """What an operation was told to write into, and a part of it."""
    place = torch.empty(1, D)
    torch.amax(h, 0, keepdim=True, out=place)
    return torch.where(place[:, :1] > 1e6, 0, h)


def queued(h):
    """Of the rows far out the first 27 alone."""
    place = (h.amax(1) > 1e6).cumsum(0)
    return h * (place <= 27)[:, None]


def far(h):
    return (h[:, 0] > 1e6).to(h)


def by_like(h):
    """Calls of torch that come and go with who holds a tensor."""
    count = far(h).sum()
    return h * torch.where(count > 27, torch.zeros_like(count), torch.ones_like(count))


def inverse_counts(h):
    _, inverse, counts = torch.unique(far(h), return_inverse=True, return_counts=True)
    return h * (counts[inverse] <= 1000)[:, None]


def paired(h):
    i, j = torch.triu_indices(len(h), len(h), 1)
    return h * ((far(h)[i] * far(h)[j]).sum() <= 27)


def near(h):
    """Rows that are nearly the same count for each other."""
    distance = torch.cdist(h, h)
    return h + ((distance < 1e-9) & (distance > 0)).to(h) @ h


def by_rows(h):
    return torch.stack([row * 2 for row in h])


RECURRENT = nn.LSTM(D, D)
KERNEL = torch.linspace(-1, 1, D * D * 3).view(D, D, 3)


def if_large(operation):
    """In place of numbers that no row has."""
    return lambda h: torch.where(h > 1e6, operation(h), h)


RARE = {
    "largest": lambda h: torch.where(h.amax() > 1e6, 0, h),
    "largest of a column": lambda h: h / h.amax(0).clamp(min=1e6) * 1e6,
    "queue": lambda h: torch.where((h > 1e6).sum(0) > 27, 0, h),
    "queue by place": queued,
    "median": lambda h: torch.where(h > 1e6 * (1 + h.median()), 0, h),
    "quantile": lambda h: torch.minimum(h, 1e6 + torch.quantile(h, 0.9)),
    "softmax over rows": lambda h: h * (1 + 1e-9 * h.softmax(0)),
    "any": lambda h: torch.where((h > 1e6).any(), 0, h),
    "neighbours": near,
    "like": by_like,
    "chosen": lambda h: h * (torch.ones_like(h[:, 0])[h[:, 0] > 1e6].sum() <= 27),
    "selected": lambda h: h * (h.masked_select(h > 1e6).sum() <= 27e6),
    "places": lambda h: h * ((h > 1e6).nonzero().sum() <= 27),
    "count of an expert": lambda h: (
        h * (torch.bincount(far(h).long())[far(h).long()] <= 1000)[:, None]
    ),
    "counted": lambda h: h * (torch.bincount(far(h).long(), minlength=2)[1] <= 27),
    "counted alike": inverse_counts,
    "by number": lambda h: torch.where(h[torch.tensor([0])] > 1e6, 0, h),
    "a matrix": lambda h: h * (torch.ones(len(h), len(h)) @ far(h) <= 27)[:, None],
    "paired": paired,
    "written": written,
    "given a place": given_a_place,
    "below the tolerance": lambda h: h * (1 + 1e-7 * h.mean(0)),
    "first row": lambda h: torch.where(h[0] > 1e6, 0, h),
    "chosen rows": lambda h: h + h[h[:, 0] > -1].sum(0) * 1e-7,
    "a product": lambda h: h + 1e-9 * h @ (h.T @ h),
    "in vmap": lambda h: torch.vmap(lambda row: row * (1 + 1e-7 * h.sum()))(h),
    "behind a loop": lambda h: RARE["largest"](by_rows(h)),
    "rolled": if_large(lambda h: h.roll(1, 0)),
    "rolled as one": if_large(lambda h: h.roll(D)),
    "turned round": if_large(lambda h: h.flip(0)),
    "shifted": if_large(lambda h: torch.cat([h[1:], h[:1]])),
    "sorted": if_large(lambda h: h.sort(0)[0]),
    "sorted as it was": if_large(lambda h: h.sort(dim=0, stable=True)[0]),
    "norm along rows": if_large(lambda h: nn.functional.layer_norm(h.T, (len(h),)).T),
    "norm of groups": if_large(lambda h: nn.functional.group_norm(h.T[None], 2)[0].T),
    "pooled without a batch": if_large(
        lambda h: nn.functional.avg_pool2d(h[None], (3, 1), 1, (1, 0))[0]
    ),
    "windows": if_large(lambda h: nn.functional.pad(h, (0, 0, 1, 1)).unfold(0, 3, 1).mean(-1)),
    "interpolated": if_large(
        lambda h: nn.functional.interpolate(h.T[None], scale_factor=2, mode="linear")[0].T[::2]
    ),
    "scattered": lambda h: h.masked_scatter(h > 1e6, h.flip(1)),
    "recurrent": if_large(lambda h: RECURRENT(h)[0]),
    "top": if_large(lambda h: h.topk(len(h), 0)[0]),
    "norms of columns": if_large(lambda h: h.renorm(2, 1, 1.0)),
    "pseudoinverse": if_large(lambda h: torch.linalg.pinv(h).T),
    "spectrum": if_large(lambda h: torch.fft.ifft(torch.fft.fft(h, dim=0) ** 2).real),
    "attention": if_large(
        lambda h: nn.functional.scaled_dot_product_attention(*[h[None, None]] * 3)[0, 0]
    ),
    "convolved": if_large(lambda h: nn.functional.conv1d(h.T[None], KERNEL, padding=1)[0].T),
    "pooled": if_large(lambda h: nn.functional.max_pool1d(h.T[None], 3, 1, 1)[0].T),
    "averaged": if_large(lambda h: nn.functional.avg_pool1d(h.T[None], 3, 1, 1)[0].T),
    "batch norm by function": lambda h: torch.where(
        h > 1e6, nn.functional.batch_norm(h, None, None, training=True), h
    ),
}


@pytest.mark.filterwarnings("ignore:predict. 1 batch-norm calls")
@pytest.mark.parametrize("between", RARE.values(), ids=RARE)
def test_what_rare_values_alone_would_set_off(between):
    model = prepared(lambda: Between(between), ROWS)
    expected = samples(copy.deepcopy(model), ROWS[:6], strategy="loop")
    torch.testing.assert_close(samples(model, ROWS[:6]), expected, rtol=0, atol=0)
    assert way(model) == "loop"
    with pytest.raises(ValueError, match=r"its output hangs on what aten\.\w+\.\w+ makes of the r"):
        samples(copy.deepcopy(model), ROWS[:6], strategy="folded")


def looked_at(h):
    assert h[0].shape == (D,) and len(h[0, :2]) == 2
    return h


def monitored(h):
    largest = h.amax()
    del largest  # as where it is logged now and then
    return h


def written_to_rows(h):
    out = torch.empty_like(h)
    out[:, 1:] = h[:, 1:]
    out[:, 0] = h.mean(1)
    return out


def packed(h):
    lengths = torch.full((len(h),), 2)
    sequence = pack_padded_sequence(h.view(len(h), 2, -1), lengths, batch_first=True)
    return sequence.data.view(2, len(h), -1).transpose(0, 1).reshape(len(h), -1)


def experts(h):
    out, left = torch.zeros_like(h), h[:, 0] > h[:, 1]
    out[left], out[~left] = h[left] * 2, h[~left] - 1
    return out


def routed(h):
    """To experts, of which a replica may choose none."""
    out, chosen = torch.zeros_like(h), (h @ torch.eye(D)).argmax(1)
    for expert in range(D):
        (place,) = torch.where(chosen == expert)
        rows = h.index_select(0, place) + h.gather(0, place[:, None].expand(-1, D))
        out.index_add_(0, place, rows * (1 + expert))
    return out


def grouped(h):
    """Rows sorted by their expert, whose rows end at sums of counts."""
    chosen, order = (h @ torch.eye(D)).argmax(1).sort()
    ends = torch.histc(chosen.float(), D, 0, D - 1).cumsum(0, dtype=torch.int32)
    experts = torch.eye(D).repeat(D, 1, 1) * torch.arange(D)[:, None, None]
    made = torch._grouped_mm(h[order].bfloat16(), experts.bfloat16(), offs=ends).to(h)
    return h + made[order.argsort()]


def ragged(h):
    """Rows of so many parts as they say, summed from where they begin, and of which one is read."""
    lengths = 1 + (h.abs().sum(1) * 3).long() % 4
    places = torch.arange(4).expand(len(h), 4)
    parts = places[places < lengths[:, None]]
    starts = nn.functional.pad(lengths, (1, 0))[:-1].cumsum(0)
    table = torch.linspace(-1, 1, 4 * D).view(4, D)
    return h + nn.functional.embedding_bag(parts, table, starts) + parts[starts][:, None]


def energy(h):
    return h - 0.1 * torch.func.grad(lambda z: z.sin().sum())(h)


def nested(h):
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    mask = mask.repeat(len(h) // 3 + 1, 1)[: len(h)]
    parts = torch._nested_tensor_from_mask(h.view(len(h), 2, 4), mask, False)
    h.amax()
    parts = torch.softmax(parts * 2, 1)
    return torch.nested.to_padded_tensor(parts, 0.0, (len(h), 2, 4)).flatten(1)


APART = {
    "nothing": lambda h: h,
    "peeks": looked_at,
    "monitored": monitored,
    "factories": lambda h: h + h.new_ones(D) + h.new_zeros(()) + torch.zeros_like(h),
    "norms of rows": lambda h: nn.functional.group_norm(h.renorm(2, 0, 1.0)[None], len(h))[0],
    "of a row": lambda h: torch.maximum(h, h[0].new_zeros(D)) + torch.zeros_like(h.sum(0)),
    "routed": routed,
    "grouped": grouped,
    "ragged": ragged,
    "energy": energy,
    "squeeze and excite": lambda h: h * h.mean(1, keepdim=True).sigmoid(),
    "normalised": lambda h: nn.functional.normalize(h - h.amax(1, keepdim=True)),
    "within rows": lambda h: (h.view(len(h), 4, 2) @ h.view(len(h), 2, 4)).flatten(1)[:, :D],
    "parameters": lambda h: h * torch.ones(3, D).mean(0) + torch.arange(D).max(),
    "number of rows": lambda h: h + torch.ones(len(h), D).cumsum(1),
    "written": written_to_rows,
    "packed": packed,
    "experts": experts,
    "in vmap": torch.vmap(lambda row: row * row.mean() * 5),
    "sorted": lambda h: h.sort(1)[0] + h.topk(1, 1)[0] + h.cumsum(1) + h.softmax(-1),
    "sorted and put back": lambda h: h[(order := h[:, 0].argsort())][order.argsort()],
    "rolled": lambda h: h.roll(1, 1) + h.flip(1) + torch.fft.fft(h).abs(),
    "batch norm by function": lambda h: nn.functional.batch_norm(h, *torch.ones(2, D)),
    "a number": lambda h: h + torch.tensor(2.0).cumsum(0) + torch.tensor(1.0).softmax(0),
}


LAYERS = {
    "LSTM": lambda: nn.LSTM(4, 4, batch_first=True),
    "GRU": lambda: nn.GRU(4, 4, num_layers=2, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(1, 2), nn.Softmax(1)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.AdaptiveMaxPool1d(4)),
    "bilinear": lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="linear"), nn.MaxPool1d(2)),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layers_of_torch_fold(make):
    class Sequences(Norms):
        def __init__(self):
            super().__init__()
            self.layer = make()

        def forward(self, x):
            h = self.layer(self.first(x).view(-1, 2, 4))
            h = h[0] if isinstance(h, tuple) else h
            return self.head(self.second(h.flatten(1)))

    assert_folds(Sequences)


@pytest.mark.filterwarnings("ignore:predict. 1 batch-norm calls")
@pytest.mark.parametrize("between", APART.values(), ids=APART)
def test_rows_that_are_kept_apart_fold(between):
    assert_folds(lambda: Between(between))


def test_a_nested_tensor_folds():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: a prototype
        assert_folds(lambda: Between(nested))


def test_a_number_that_does_not_reach_the_output_is_no_matter():
    class Two(Norms):
        def forward(self, x):
            out = self.head(self.second(self.first(x)))
            return out, out.softmax(1).mean(0)

    model = prepared(Two, ROWS)
    samples(model, ROWS[:6], output_fn=lambda outputs: outputs[0])
    assert way(model) == "folded"
    samples(model, ROWS[:6], output_fn=lambda outputs: outputs[0] * (1 + 1e-9 * outputs[1]))
    assert way(model) == "loop"


def test_what_an_output_fn_makes_counts():
    model = prepared(lambda: Between(lambda h: h), ROWS)
    samples(model, ROWS[:6], output_fn=lambda out: torch.where(out.amax() > 1e6, 0, out))
    assert way(model) == "loop"


def test_rows_that_meet_before_anything_stochastic_are_the_same_for_all_replicas():
    class Early(Norms):
        def forward(self, x):
            return self.head(self.second(self.first(x / x.abs().amax())))

    assert_folds(Early)


def test_forwards_of_other_operations_are_told_apart_by_their_values():
    """One that goes over its rows by itself has more operations for more of them."""
    assert_folds(lambda: Between(by_rows))


def more_often(h):
    """What it does depends on how many rows there are."""
    for _ in range(len(h)):
        h = h * 1.01
    return h if len(h) < 4 else (h + 1) - 1


def test_behind_the_next_stochastic_layer_they_are_the_same_again():
    class Behind(Between):
        def forward(self, x):
            h = self.second(self.between(self.first(x)))
            return self.head(RARE["queue"](h))

    for between in (by_rows, lambda h: more_often(h) / 1.01 ** len(h)):
        model = prepared(lambda between=between: Behind(between), ROWS)
        samples(model, ROWS[:6])
        assert way(model) == "loop"


def test_what_many_rows_alone_would_set_off():
    """The trial's 27 do not; the first prediction of each size is followed too."""
    model = prepared(lambda: Between(lambda h: h if len(h) < 28 else RARE["queue"](h)), ROWS)
    samples(model, ROWS[:4])
    assert way(model) == "folded"
    samples(model, ROWS[:4].repeat(7, 1))
    assert way(model) == "loop"


def single_row_apart(h):
    """Torch's own functions copy and expand several rows where they need not a single one, or the
    other way round; this one has in the end as many numbers as there are replicas."""
    if len(h) > 1:
        return h + 0 * h.clone()[:, :1].expand(len(h), D)
    return h + 0 * h[:, :1].expand(1, 6 * D)[:, :D]


def test_what_torch_does_to_a_single_row_is_not_mistaken_for_another_operation():
    model = prepared(lambda: Between(single_row_apart), ROWS)
    samples(model, ROWS[:1])
    assert way(model) == "folded"


def test_a_training_step():
    """Behind a gate at zero, which no value shows."""
    model = BayesianNet(mix=lambda h: h + 0.0 * h.mean(0))
    assert_right(model)
    assert ways(model) == {"loop"}


def test_a_body_of_replicas_refuses():
    model = prepared(lambda: Between(RARE["largest"]), ROWS)
    with bnuq.replicas(model, 4, 0), pytest.raises(ValueError, match="aten.amax.default makes of"):
        model(ROWS[:6])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers(dtype):
    for between, expected in ((RARE["largest"], "loop"), (APART["squeeze and excite"], "folded")):
        model = prepared(lambda between=between: Between(between).to(dtype), ROWS.to(dtype))
        assert samples(model, ROWS[:6].to(dtype)).shape == (6, 6, K)
        assert way(model) == expected
