"""PyTorch's own cases of its batch-norm modules, against the stochastic classes."""

import copy

import pytest
import torch

reason = "torch.testing._internal is private, and needs expecttest"
pytest.importorskip("expecttest", reason=reason)
common_modules = pytest.importorskip("torch.testing._internal.common_modules", reason=reason)
common_utils = pytest.importorskip("torch.testing._internal.common_utils", reason=reason)
device_type = pytest.importorskip("torch.testing._internal.common_device_type", reason=reason)
# Their import forbids the whole process to set such flags as torch.backends.cudnn.allow_tf32.
# Not by setattr: torch.backends stands before the module whose variable this is.
flags = torch.backends.disable_global_flags.__globals__
flags["__allow_nonbracketed_mutation_flag"] = True

from bnuq_ext.nn import STOCHASTIC_CLASSES  # noqa: E402


def stochastic_infos():
    """torch's ModuleInfo of each batch norm, with our class; `reference` is torch's."""
    for info in common_modules.module_db:
        if info.module_cls in STOCHASTIC_CLASSES:
            ours = copy.copy(info)
            ours.reference = info.module_cls
            ours.module_cls = STOCHASTIC_CLASSES[info.module_cls]
            ours.decorators = ()  # they are for torch's own tests
            yield ours


INFOS = list(stochastic_infos())


def test_torch_has_cases_for_all_three():
    assert [info.reference.__name__ for info in INFOS] == [f"BatchNorm{d}d" for d in (1, 2, 3)]


def test_flags_of_backends_can_be_set(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not torch.backends.cudnn.allow_tf32


def cases(info, device, dtype, training):
    """(our module, torch's, x) of every case."""
    for case in info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=True, training=training
    ):
        args, kwargs = case.constructor_input.args, case.constructor_input.kwargs
        ours, torchs = (
            cls(*args, **kwargs).to(device, dtype).train(training)
            for cls in (info.module_cls, info.reference)
        )
        ours.load_state_dict(torchs.state_dict())
        yield ours, torchs, case.forward_input.args[0]


class TestDropIn(common_utils.TestCase):
    @common_modules.modules(INFOS, allowed_dtypes=[torch.float32, torch.float64])
    def test_matches_torch(self, device, dtype, module_info, training):
        count = 0
        for ours, torchs, x in cases(module_info, device, dtype, training):
            results = []
            for module in (ours, torchs):
                inputs = x.detach().clone().requires_grad_()
                y = module(inputs)
                y.backward(torch.linspace(-1, 1, y.numel(), device=device, dtype=dtype).view_as(y))
                grads = {name: p.grad for name, p in module.named_parameters()}
                results.append((y, inputs.grad, grads, dict(module.named_buffers())))
            self.assertEqual(*results, rtol=0, atol=0)
            count += 1
        self.assertGreaterEqual(count, 5)

    @common_modules.modules(INFOS, allowed_dtypes=[torch.float64])
    def test_gradcheck(self, device, dtype, module_info, training):
        for module, _, x in cases(module_info, device, dtype, training):
            names = [name for name, _ in module.named_parameters()]

            def forward(x, *parameters, module=module, names=names):
                buffers = {name: b.clone() for name, b in module.named_buffers()}
                state = {**dict(zip(names, parameters, strict=True)), **buffers}
                return torch.func.functional_call(module, state, (x,))

            if x.numel():
                self.assertTrue(torch.autograd.gradcheck(forward, (x, *module.parameters())))


device_type.instantiate_device_type_tests(TestDropIn, globals(), only_for=("cpu", "cuda"))
