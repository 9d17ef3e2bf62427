"""On a real GPU: small memsets of recorded launches are kernels, and do what they did."""

import pytest
import torch

from treadle.runtime.replay import cuda_graph
from treadle.runtime.replay.cuda_graph import CudaRecorder

WORDS = 4096


def memsets(driver, buffer: torch.Tensor) -> None:
    """Between additions to the same words: of bytes, of halves, of words, small and large."""
    stream, first = torch.cuda.current_stream().cuda_stream, buffer.data_ptr()
    parts = (
        (driver.cuMemsetD8Async, 0, 0, 4),
        (driver.cuMemsetD8Async, 64, 0xA5, 400),
        (driver.cuMemsetD16Async, 1024, 0x1234, 6),
        (driver.cuMemsetD32Async, 2048, 0xDEADBEEF, 1024),
        (driver.cuMemsetD32Async, 8192, 77, 1025),
        (driver.cuMemsetD8Async, 12801, 3, 5),
    )
    for number, (function, offset, value, count) in enumerate(parts):
        buffer.add_(number)
        assert int(function(first + offset, value, count, stream)[0]) == 0
        buffer.mul_(3)


def test_small_memsets_are_kernels_and_nothing_else_changes(monkeypatch):
    driver = cuda_graph._driver()
    assert driver is not None, "PyTorch for CUDA brings it"
    start = torch.randint(-(2**31), 2**31 - 1, (WORDS,), device="cuda", dtype=torch.int32)
    buffer = start.clone()
    memsets(driver, buffer)
    expected = buffer.clone()

    replaced = []
    change = cuda_graph.memsets_as_kernels
    monkeypatch.setattr(
        cuda_graph,
        "memsets_as_kernels",
        lambda graph, with_driver: replaced.append(change(graph, with_driver)),
    )
    recorder = CudaRecorder(torch.device("cuda"), lambda: None)
    recorder.start()
    _, replay = recorder.record(lambda: memsets(driver, buffer) or {})
    assert replaced == [4], "two are larger than a kernel of one block, or not of words"
    for _ in range(3):
        buffer.copy_(start)
        replay()
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("rows", [128, 2048])
def test_products_and_attention_in_a_recording(rows):
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def launches():
        q = torch.mm(x, w).view(1, rows, 16, 64).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        out.copy_(torch.mm(attended.transpose(1, 2).reshape(rows, 1024), w))
        return {}

    launches()
    recorder = CudaRecorder(torch.device("cuda"), lambda: None)
    recorder.start()
    _, replay = recorder.record(launches)
    for _ in range(3):
        x.normal_()
        out.fill_(float("nan"))
        launches()
        expected = out.clone()
        out.fill_(float("nan"))
        replay()
        assert torch.equal(out, expected)
