"""The stream thread on a GPU's driver: engines made up at random, against a copy one element at a time. On the driver
whose device is the host, always; that order holds on a device is for streams that really run beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is missing: engines are made of its tensors")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.errors import LayoutError, PluginError, TransferError
from lmcache_core.plugins import load_transfer
from lmcache_core.streaming import Copying, Layer
from lmcache_cuda.device import Device, EngineStream
from lmcache_cuda.driver import Driver
from lmcache_transfer import cuda
from lmcache_transfer.cudadevice import CudaDevice
from lmcache_transfer.streamed import StreamedTransfer, StreamOptions
from tests.cuda.conftest import FakeDriver
from tests.transfer.test_streamed import Drawn, check_store_and_load, drawn

CUBIN = b"\x7fELF as if"


class OnGpu:
    """A tensor of the host's that says it is a GPU's."""

    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def data_ptr(self) -> int:
        return int(self._tensor.data_ptr() if hasattr(self._tensor, "data_ptr") else self._tensor.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        if hasattr(self._tensor, "data_ptr"):
            return tuple(self._tensor.stride())
        return tuple(each // self._tensor.itemsize for each in self._tensor.strides)

    def element_size(self) -> int:
        return int(self._tensor.element_size() if hasattr(self._tensor, "data_ptr") else self._tensor.itemsize)


def moved(layers: list[Any]) -> list[Any]:
    return [tuple(map(OnGpu, layer)) if isinstance(layer, tuple) else OnGpu(layer) for layer in layers]


def transfer_on(fake: FakeDriver, *, direct: int = 0, staging: int = 1 << 20) -> StreamedTransfer:
    device = CudaDevice(Device(Driver(fake.path), 0), CUBIN, number=0, max_blocks=2, direct=direct)
    return StreamedTransfer(device, StreamOptions(staging=staging))


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes on the default stream."""
    monkeypatch.setattr(CudaDevice, "engine_stream", lambda self: EngineStream(self._device, 0))


@pytest.mark.parametrize("direct", [0, 1])
@given(this=drawn(), layerwise=st.booleans())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_store_and_load(fake: FakeDriver, direct: int, this: Drawn, layerwise: bool) -> None:
    transfer = transfer_on(fake, direct=direct)
    check_store_and_load(transfer, moved(this.engine.layers), this, layerwise=layerwise)
    transfer.close()
    assert fake.left == 0


BLOCKS, TOKENS, HEADS, DIM, LAYERS = 8, 16, 2, 16, 3


@pytest.fixture
def layers() -> list[Any]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 256, (2, BLOCKS, TOKENS, HEADS, DIM), np.uint8) for _ in range(LAYERS)]


@pytest.fixture
def transfer(fake: FakeDriver) -> Iterator[StreamedTransfer]:
    made = transfer_on(fake)
    yield made
    made.close()


def test_what_a_layer_of_a_prompt_takes(fake: FakeDriver, transfer: StreamedTransfer, layers: list[Any]) -> None:
    """One kernel and one batch of copies a layer, however many pages; of a whole chunk one copy."""
    kv = transfer.register(moved(layers), dims="2bthd", page_tokens=TOKENS)
    view, whole = kv.view([3, 1, 4, 5]), memoryview(bytearray(4 * kv.page_bytes))
    store = transfer.store([Copying(0, view, 0, 4, whole)])
    before = len(fake.log)
    for layer in range(LAYERS):
        store.computed(Layer(0, layer))
    store.end().result(10)
    store.close()
    done = [line.split()[0:2] for line in fake.log[before:] if line.split()[0] in ("launch", "batch", "copy")]
    each = [["launch", "kv_gather_16"], ["batch", "4"]]
    assert done == [["copy", "32"], *each * LAYERS]  # the numbers of its blocks first
    before = len(fake.log)
    load = transfer.load([Copying(0, view, 0, 4, whole)])
    load.done.result(10)
    load.close()
    done = [line.split()[0:2] for line in fake.log[before:] if line.split()[0] in ("launch", "batch", "copy")]
    assert sorted(done) == sorted([["copy", "32"], ["copy", str(len(whole))], ["launch", "kv_scatter_16"]])


def test_room_for_numbers_is_used_again(fake: FakeDriver, transfer: StreamedTransfer, layers: list[Any]) -> None:
    kv = transfer.register(moved(layers), dims="2bthd", page_tokens=TOKENS)
    page = memoryview(bytearray(kv.page_bytes))
    for _ in range(5):
        kv.view([2]).gather(0, 0, 1, page)
    assert sum(line == "register 4096 3" for line in fake.log) == 1


def test_tensors_that_are_elsewhere(transfer: StreamedTransfer, layers: list[Any]) -> None:
    with pytest.raises(LayoutError, match="not in memory of a device of kind cuda"):
        transfer.register(layers, dims="2bthd", page_tokens=TOKENS)


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize"])
def test_a_gpu_that_fails(fake: FakeDriver, layers: list[Any], call: str) -> None:
    """Nobody waits for ever, and what went wrong is said."""
    transfer = transfer_on(fake)
    kv = transfer.register(moved(layers), dims="2bthd", page_tokens=TOKENS)
    store = transfer.store([Copying(0, kv.view([1]), 0, 1, memoryview(bytearray(kv.page_bytes)))])
    fake.fail(call, 719)
    try:
        with pytest.raises(TransferError, match=rf"{call} failed .*\(719\); nothing in this process"):
            store.end().result(10)
    finally:
        fake.fail("", 0)
    store.close()
    transfer.close()


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "Driver", lambda: Driver("libcuda-nowhere.so.1"))
    with pytest.raises(PluginError, match=r"the transfer 'cuda' cannot be used: NVIDIA's driver is not on this"):
        load_transfer("cuda").create({})


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    monkeypatch.setattr(cuda, "Driver", lambda: Driver(fake.path))
    with pytest.raises(TransferError, match=r"the transfer 'cuda' cannot use GPU 7: cuDeviceGet failed .*nvidia-smi"):
        load_transfer("cuda").create({"device": 7})


def test_options(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    monkeypatch.setattr(cuda, "Driver", lambda: Driver(fake.path))
    monkeypatch.setattr(cuda, "compile_kernels", lambda capability, driver: CUBIN)
    made = load_transfer("cuda").create({"device": 1, "staging": "1MiB", "max_blocks": 3, "direct": "4KiB"})
    assert isinstance(made, StreamedTransfer)
    device = made._device
    assert isinstance(device, CudaDevice)
    assert (device.number, device.direct, device._max_blocks) == (1, 4096, 3)
    made.close()
    with pytest.raises(Exception, match=r"transfer cuda: .*max_blocks"):
        load_transfer("cuda").create({"max_blocks": 0})
