"""Types of results are those that kernels give, where PyTorch's fake tensors say others."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.compat.fake import MISTYPED, FakeTensorMode, fake_result

aten = torch.ops.aten
SIZES = (4, 6, 5)


def called(operation, x, other):
    """What ``operation`` is given for a norm of ``x`` with parameters like ``other``."""
    weight, rows = other.expand(SIZES[1]).clone(), other.expand(SIZES[2]).clone()
    running = weight.clone(), weight.clone()
    match operation:
        case aten.native_layer_norm.default:
            return x, [SIZES[2]], rows, rows, 1e-5
        case aten.native_group_norm.default:
            return x, weight, weight, *SIZES, 2, 1e-5
        case aten._native_batch_norm_legit.no_stats:
            return x, weight, weight, True, 0.1, 1e-5
        case aten._batch_norm_with_update_functional.default:
            return x, weight, weight, *running, 0.1, 1e-5
        case _:
            return x, weight, weight, *running, True, 0.1, 1e-5


@pytest.mark.parametrize("parameters", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("operation", sorted(MISTYPED, key=str), ids=str)
def test_statistics_of_norms_have_the_dtype_of_the_kernels(operation, dtype, parameters):
    def found(run):
        x, other = torch.ones(SIZES, dtype=dtype), torch.ones((), dtype=parameters or dtype)
        return [each.dtype for each in run(*called(operation, x, other))][:3]

    real = found(operation)
    with FakeTensorMode():
        assert found(lambda *args: fake_result(operation, args, {})) == real


def gradients(numerics=None, **options):
    torch.manual_seed(0)
    norms = nn.LayerNorm(16), nn.Unflatten(1, (8, 2)), nn.GroupNorm(4, 8), nn.Flatten()
    model = nn.Sequential(nn.Linear(8, 16), *norms, nn.GELU(), nn.Linear(16, 3))

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        return loss.detach()

    run = step
    if numerics is not None:
        chosen = treadle.Options(numerics=numerics, **options)
        run = treadle.compile(step, model=model, options=chosen)
    run(torch.randn(64, 8), torch.randint(3, (64,)))
    return {name: each.grad for name, each in model.named_parameters()}


def test_norms_under_autocast_keep_their_statistics_in_32_bits():
    """Rounded to 16 bits they cost the gradients of what is before the norm a hundredth."""
    eager, library = gradients(), gradients("eager", codegen=False)
    assert all(eager[name].equal(library[name]) for name in eager)
    generated = gradients("eager", codegen=True)
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(generated[name], eager[name], rtol=0, atol=1e-4)
