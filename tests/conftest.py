import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("bnuq", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("bnuq")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# Against a float64 reference of the same (rounded) inputs: relative and absolute tolerance.
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture
def assert_close():
    """Compares with a float64 reference, by the tolerance of `dtype` (by default `actual`'s)."""

    def check(actual, expected, dtype=None, scale=1.0):
        rtol, atol = TOLERANCES[dtype or actual.dtype]
        torch.testing.assert_close(
            actual.detach().double().cpu(),
            expected.detach().double().cpu(),
            rtol=rtol * scale,
            atol=atol * scale,
        )

    return check
