"""A first call compiles no device code: workers have compiled what its launches ask for."""

import treadle
from gpu.small_language import small_language
from treadle.runtime.kernels import triton_ahead


def entries(folder):
    """Device code, and what Triton compiles on the host to launch it."""
    return {path.parent.name for kind in ("cubin", "so") for path in folder.glob(f"*/*.{kind}")}


def test_launches_find_what_workers_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(triton_ahead, "_FUNCTIONS_PER_WORKER", 1)
    train, model, optimizer, tokens = small_language()
    options = treadle.Options(cache_dir=str(tmp_path / "cache"))
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    step.prepare(tokens)
    compiled = entries(tmp_path / "triton")
    assert len(compiled) > 3
    for _ in range(4):
        step(tokens)
    assert entries(tmp_path / "triton") == compiled
