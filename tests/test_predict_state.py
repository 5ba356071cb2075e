"""What predict leaves behind, how much memory it takes,
and what happens when there is too little."""

import copy
import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from predicting import DATA, SAMPLERS, X, equal, predict
from torch._subclasses import FakeTensorMode

import bnuq_ext as bnuq
from benchmarks.memory import peak_extra_bytes
from bnuq_ext import chunks, model_cache, ops, prediction, predictor
from bnuq_ext.chain_folding import ChainFolding
from bnuq_ext.state import modules_of


def test_leaves_flags_buffers_gradients_and_generators(model):
    model.train()
    model[4].eval()
    flags = {name: m.training for name, m in model.named_modules()}
    state, version = copy.deepcopy(model.state_dict()), model[0].weight._version
    rng = torch.get_rng_state()
    eval_pred = predict(model, keep_samples=True)
    assert {name: m.training for name, m in model.named_modules()} == flags
    assert torch.equal(torch.get_rng_state(), rng) and model[0].weight._version == version
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert not eval_pred.mean.requires_grad and torch.is_grad_enabled()
    assert not eval_pred.mean.is_inference()
    equal(predict(model.eval(), keep_samples=True), eval_pred)


def test_snapshots_of_a_prediction_are_its_own(model):
    expected = predict(model)
    predict(model).snapshots.zero_()
    equal(predict(model), expected)
    assert torch.equal(predict(model).snapshots, expected.snapshots)


def test_a_known_model_takes_each_sampler_and_batch_size_for_itself(model):
    asked = [("bank", None), *((s, size) for s in SAMPLERS[1:] for size in (None, 12, 32))]
    for sampler, size in asked:
        options = {"sampler": sampler, "batch_size": size, "keep_samples": True}
        equal(predict(model, **options), predict(copy.deepcopy(model), **options))


def test_leaves_flags_after_an_exception(model):
    model.train()
    with pytest.raises(RuntimeError):
        predict(model, torch.randn(3, 5, 6, 6))
    assert model.training and model[3].training
    equal(predict(model), predict(model.eval()))


def test_runs_inside_inference_mode_and_with_gradients_on(model):
    expected = predict(model)
    with torch.inference_mode():
        equal(predict(model), expected)
    with torch.enable_grad():
        equal(predict(model, X.clone().requires_grad_()), expected)


def predicted(model, sampler, path):
    predict(model, sampler=sampler)


def entered(model, sampler, path):
    with bnuq.replicas(model, 4, 0, sampler=sampler):
        model(X)


def loaded(model, sampler, path):
    bnuq.attach(model, bnuq.Bank.load(path))


def unpickled(model, sampler, path):
    bnuq.attach(model, pickle.loads(pickle.dumps(bnuq.Bank.load(path))))


def deepcopied(model, sampler, path):
    bnuq.attach(model, copy.deepcopy(bnuq.Bank.load(path)))


@pytest.mark.parametrize("sampler", ["bank", "joint", "lognormal", "normal"])
@pytest.mark.parametrize("before", [predicted, entered, loaded, unpickled, deepcopied])
def test_what_was_done_in_inference_mode_takes_gradients_afterwards(
    model, tmp_path, before, sampler
):
    """As after the validation of a trainer that validates in inference mode."""

    def gradients(model):
        with bnuq.replicas(model, 4, 0, sampler=sampler):
            model(X).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(copy.deepcopy(model))
    bank = next(m.bank for m in model.modules() if hasattr(m, "bank"))
    bank.save(tmp_path / "bank")
    with torch.inference_mode():
        before(model, sampler, tmp_path / "bank")
    assert all(map(torch.equal, gradients(model), expected))


def test_bad_arguments_draw_nothing(model):
    rng = torch.get_rng_state()
    for bad in (
        {"num_samples": 0},
        {"sampler": "mc"},
        {"chunk": 0},
        {"batch_size": 3},
        {"noise_var": 1},
    ):
        with pytest.raises((ValueError, TypeError)):
            predict(model, seed=None, **bad)
    with pytest.raises(ValueError):
        predict(model, seed=None, sampler="joint", batch_size=10**6)
    assert torch.equal(torch.get_rng_state(), rng)


def test_threads_share_a_model(model):
    model.train()
    expected = [predict(model, X[i % 4 :], seed=i) for i in range(16)]
    fresh = copy.deepcopy(model)
    start = threading.Barrier(16)

    def work(i):
        start.wait()
        return [predict(fresh, X[i % 4 :], seed=i) for _ in range(3)][-1]

    with ThreadPoolExecutor(16) as pool:
        for mine, theirs in zip(pool.map(work, range(16)), expected, strict=True):
            equal(mine, theirs)
    assert fresh.training and fresh[3].training


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_peak_memory_does_not_grow_with_the_number_of_replicas(model, sampler, likelihood):
    def run(num_samples):
        return predict(
            model, likelihood=likelihood, sampler=sampler, num_samples=num_samples, chunk=16
        )

    run(16)
    few, many = peak_extra_bytes(lambda: run(32)), peak_extra_bytes(lambda: run(320))
    # What grows are the snapshots' numbers, eight bytes a replica, and their making.
    assert many < few + 320 * 8 * 4
    assert peak_extra_bytes(lambda: predict(model, num_samples=320, chunk=160)) > 2 * few


def test_two_hundred_predictions_leave_nothing(model):
    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    predict(model)
    before = tensors()
    for seed in range(200):
        predict(model, seed=seed)
    assert tensors() <= before


class Memory:
    """Stands for a machine on which a forward of more than `most` rows does not fit."""

    def __init__(self, model, most, error):
        self.most, self.error, self.seen = most, error, []
        self.handle = model.register_forward_pre_hook(self.check)

    def check(self, module, args):
        self.seen.append(args[0].shape[0])
        if self.seen[-1] > self.most:
            raise self.error


CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"
)
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError(CPU_MESSAGE),
    # From inside of an op, whose exceptions are of this type.
    RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError(
        'torch_call_dispatcher( "aten::new_empty", "", 0) API call failed at ops.h, line 9'
    ),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
def test_too_little_memory_halves_the_chunk(model, error):
    expected = predict(model, keep_samples=True)
    memory = Memory(model[4], 9 * 6, error)
    for likelihood in ("categorical", "gaussian"):
        pred = predict(model, likelihood=likelihood, keep_samples=True)
        torch.testing.assert_close(pred.samples, expected.samples, rtol=1e-5, atol=1e-6)
    equal(predict(model, keep_samples=True), expected)
    assert max(memory.seen) == 180 and 45 in memory.seen


def bank_op(x, num_samples):
    statistics = torch.zeros(1, x.shape[1]), torch.ones(1, x.shape[1])
    seed = ops.new_seed(0)
    return ops.batch_norm_bank(x, *statistics, seed, num_samples=num_samples, shared=True)


LAST = torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
WEIGHTS = torch.zeros(4, 3), torch.zeros(4, 3)
TOO_MUCH = {
    "contiguous": lambda: bank_op(torch.zeros(2, 3), 2**52),
    "channels_last": lambda: bank_op(LAST, 2**50),
    "copied": lambda: ops.predictive_statistics(torch.zeros(1, 1, 1).expand(1, 2**30, 2**30)),
    "philox_normal": lambda: ops.philox_normal(ops.new_seed(0), 0, (2**30, 2**30)),
    "bayes_linear": lambda: ops.bayes_linear(
        torch.zeros(2, 3), *WEIGHTS, seed=ops.new_seed(0), stream=0, num_samples=2**52
    ),
}


@pytest.mark.parametrize("call", TOO_MUCH.values(), ids=TOO_MUCH)
def test_an_op_that_finds_no_memory_is_known(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    assert chunks.is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "std::bad_alloc (originally from torch_parallel_for(begin, end, ...) API call failed",
        "aoti_torch_cpu__linear_pointwise( x ) API call failed at product.h, line 9",
        'torch_call_dispatcher( "aten::to", "dtype_layout", 0) API call failed at ops.h, line 9',
    ],
)
def test_what_torch_s_c_interface_leaves_of_it_is_known(text):
    assert chunks.is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    [
        "GET was unable to find an engine to execute this computation",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_what_cuda_s_libraries_say_of_it_is_known(text):
    assert chunks.is_out_of_memory(RuntimeError(text))


def test_another_failure_is_not_taken_for_it():
    other = "torch_call_dispatcher( aten::mm ) API call failed at ops.h, line 9"
    assert not chunks.is_out_of_memory(RuntimeError(other))
    assert not chunks.is_out_of_memory(ValueError("out of memory"))


def test_memory_that_ends_while_a_chunk_is_taken_in(model, monkeypatch):
    expected = predict(model, keep_samples=True, chunk=8)
    original, calls = prediction.predictive_accumulate_, []

    def sometimes(*args):
        calls.append(args[3].shape[0])
        if calls[-1] == 7 and len(calls) == 2:
            raise RuntimeError(CPU_MESSAGE)
        original(*args)

    monkeypatch.setattr(prediction, "predictive_accumulate_", sometimes)
    equal(predict(model, keep_samples=True, chunk=8), expected)
    assert calls[:4] == [7, 7, 3, 3]


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("keep", [False, True])
def test_says_what_would_fit_when_one_replica_does_not(model, strategy, keep):
    Memory(model[4], 4, RuntimeError(CPU_MESSAGE))
    message = "predict: x must fit in memory with one replica at a time, got 9 rows; a loader with batches of 4"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        predict(model, strategy=strategy, keep_samples=keep)
    batches = list(X.split(4))
    equal(predict(model, batches), predict(model, batches, strategy="loop"))


@pytest.mark.parametrize("keep", [False, True])
def test_says_what_would_fit_when_one_replica_cannot_be_taken_in(model, keep, monkeypatch):
    def accumulate(*args):
        raise RuntimeError(CPU_MESSAGE)

    monkeypatch.setattr(prediction, "predictive_accumulate_", accumulate)
    with pytest.raises(torch.OutOfMemoryError, match="predict: x must fit in memory with one"):
        predict(model, chunk=1, keep_samples=keep)


def test_says_that_a_single_row_does_not_fit_without_advice(model):
    Memory(model[4], 0, RuntimeError(CPU_MESSAGE))
    message = r"predict: x must fit in memory with one replica at a time, got 1 rows \("
    with pytest.raises(torch.OutOfMemoryError, match=message):
        predict(model, X[:1])


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_says_that_outputs_cannot_be_kept(model, strategy, monkeypatch):
    def keep(self, samples, outputs, done):
        raise RuntimeError(CPU_MESSAGE)

    expected = predict(model)
    monkeypatch.setattr(predictor.Predictor, "_keep", keep)
    message = "predict: keep_samples must be False unless the outputs of all replicas fit in memory, got True for 20 replicas of 180 bytes"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        predict(model, strategy=strategy, keep_samples=True)
    monkeypatch.undo()
    equal(predict(model), expected)


def test_chunks_of_activations_stay_below_the_budget(model, monkeypatch):
    monkeypatch.setattr(chunks, "CPU_BYTES", 5 * 9 * 6 * 4 * 4 * 4)
    seen = []
    original = ChainFolding.run
    monkeypatch.setattr(
        ChainFolding,
        "run",
        lambda self, p, f, size: seen.append(size) or original(self, p, f, size),
    )
    predict(model)
    assert seen == [5, 5, 5, 5]
    seen.clear()
    predict(model, num_samples=11)
    assert seen == [4, 4, 3]
    monkeypatch.setattr(chunks, "CPU_BYTES", 10)
    seen.clear()
    predict(model, num_samples=3)
    assert seen == [1, 1, 1]


def test_a_part_of_a_model_by_the_names_of_the_whole_and_by_its_own(model):
    """Its layers have other names where the statistics are fresh ones."""
    whole = torch.nn.Sequential(model)
    bnuq.collect(whole, list(DATA[:48].split(8)), 6, progress=False)
    predict(whole[0], strategy="folded")
    predict(whole[0], strategy="folded", sampler="batch", loader=list(DATA.split(8)))


def test_all_states_of_a_model_share_one_lock(model):
    before = model_cache.cache_of(model, modules_of(model))
    with torch.no_grad():
        model[0].weight.add_(1)
    after = model_cache.cache_of(model, modules_of(model))
    assert after is not before and after.planning is before.planning


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("edit", ["in place", "an entry", "all entries"])
def test_a_bank_that_has_been_changed_is_drawn_from_as_it_is(model, sampler, edit):
    bank, before = model[1].bank, predict(model, sampler=sampler)
    if edit == "in place":
        bank.var["1"].mul_(4)
    elif edit == "an entry":
        bank.var["1"] = bank.var["1"] * 4
    else:
        bank.var = {**bank.var, "1": bank.var["1"] * 4}
    actual = predict(model, sampler=sampler)
    sizes = {"batch_size": bank.batch_size, "dataset_size": bank.dataset_size}
    fresh = copy.deepcopy(model)
    bnuq.attach(fresh, bnuq.Bank(bank.mean, bank.var, bank.count, **sizes))
    assert torch.equal(actual.mean, predict(fresh, sampler=sampler).mean)
    assert not torch.equal(actual.mean, before.mean)


def test_a_sampler_is_made_while_another_thread_begins_anew(model, monkeypatch):
    make = model_cache.make_sampler

    def made(*args):
        model_cache._CHAIN_CACHES[model].samplers._made = {}
        return make(*args)

    monkeypatch.setattr(model_cache, "make_sampler", made)
    predict(model)


@pytest.mark.parametrize("sampler", ["bank", "joint", "lognormal"])
def test_what_is_drawn_without_memory_serves_nothing_later(model, sampler):
    expected = predict(copy.deepcopy(model), sampler=sampler)
    predict(model)  # so that the way is known
    with FakeTensorMode(allow_non_fake_inputs=True):
        predict(model, sampler=sampler)
    actual = predict(model, sampler=sampler)
    assert type(actual.mean) is torch.Tensor and torch.equal(actual.mean, expected.mean)
