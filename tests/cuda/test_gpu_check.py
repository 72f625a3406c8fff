"""The script that checks a GPU runs from end to end, here on the driver whose device is the host, and finds faults."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is missing: the transfer's tests are made of its tensors")

from benchmarks.gpu import checking
from benchmarks.gpu.check import carry_out, main
from benchmarks.gpu.gpu import opened
from benchmarks.gpu.measuring import Scale
from lmcache_transfer import pipeline
from lmcache_transfer.cudadevice import CudaDevice
from tests.cuda.conftest import FakeDriver

CUBIN = b"\x7fELF as if"


@pytest.fixture(autouse=True)
def default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is there, and has no GPU."""
    from lmcache_cuda.device import EngineStream

    monkeypatch.setattr(CudaDevice, "engine_stream", lambda self: EngineStream(self._device, 0))


def test_all_of_it(fake: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(0, fake.path, CUBIN) as gpu:
        rows = carry_out(gpu, cases=20, seeds=2, scale=Scale(1 << 20, 256))
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    assert {"gpu.copy_out.rate", "gpu.launch", "gpu.run_512.mapped", "gpu.prompt.load_layers"} <= set(names)
    said = capsys.readouterr().out
    assert "40 launches on random layouts, all bytes right" in said
    assert "8 stores and loads beside an engine, all right" in said


def test_a_wrong_kernel_is_found(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(0, fake.path, CUBIN) as gpu:
        monkeypatch.setattr(gpu.kernels, "scatter", gpu.kernels.gather)
        with pytest.raises(AssertionError, match="scatter: seed 0"):
            checking.check_kernels(gpu, 1)


def test_a_wrong_copy_is_found(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = pipeline.Move.slices

    def one_off(self: Any, layers: range, pages: range, staging: int) -> Any:
        found = list(slices(self, layers, pages, staging))
        for (at, _, size), (_, here, _) in zip(found, [*found[1:], found[0]], strict=True):
            yield at, here, size

    monkeypatch.setattr(pipeline.Move, "slices", one_off)
    with opened(0, fake.path, CUBIN) as gpu, pytest.raises(AssertionError, match=r"(loaded|stored) wrong"):
        checking.check_pipeline(gpu, 3)


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([])
    if code != 2:
        pytest.skip("there is a GPU here")
    assert "no GPU can be checked: " in capsys.readouterr().err
