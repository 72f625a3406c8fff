"""Driver and device against a libcuda that checks what it is told and runs the kernels on the host."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lmcache_cuda.device import Device, EngineStream, Event, Memory, Module, Piece, Stream
from lmcache_cuda.driver import BRIEF_CALLS, CALLS, Driver
from lmcache_cuda.errors import ClosedError, DriverError, GeometryError, UnavailableError
from lmcache_cuda.kernels import Kernels
from tests.cuda.conftest import FakeDriver
from tests.cuda.engines import address, case

CUBIN = b"\x7fELF as if"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    one = Device(Driver(fake.path), 1)
    with one.current():
        yield one
    one.close()


class TestDriver:
    def test_none_on_this_machine(self) -> None:
        with pytest.raises(UnavailableError, match=r"NVIDIA's driver is not on this machine .*nowhere.*install it, or"):
            Driver("libcuda-nowhere.so.1")

    def test_a_library_that_is_something_else_or_far_too_old(self) -> None:
        with pytest.raises(UnavailableError, match=r"libc.so.6 has no cuInit; .*CUDA 12.0 or later.*525"):
            Driver("libc.so.6")

    def test_one_that_is_too_old(self, fake: FakeDriver) -> None:
        fake.is_for(11, 8)
        with pytest.raises(UnavailableError, match=r"is for CUDA 11.8; one for CUDA 12.0 or later is needed"):
            Driver(fake.path)

    def test_a_machine_without_a_gpu(self, fake: FakeDriver) -> None:
        fake.fail("cuInit", 100)
        with pytest.raises(DriverError) as failed:
            Driver(fake.path)
        assert failed.value.code == 100
        assert str(failed.value) == (
            "cuInit failed with CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected; "
            "no GPU can be used: see nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus"
        )

    def test_an_error_that_the_driver_cannot_name(self, fake: FakeDriver) -> None:
        fake.fail("cuInit", 4711)
        with pytest.raises(DriverError, match=r"^cuInit failed with an error that this driver does not know \(4711\)$"):
            Driver(fake.path)

    @pytest.mark.parametrize(("version", "batches"), [((12, 0), False), ((12, 8), True), ((13, 1), True)])
    def test_batches_where_the_driver_has_them(self, fake: FakeDriver, version: tuple[int, int], batches: bool) -> None:
        fake.is_for(*version)
        driver = Driver(fake.path)
        assert driver.version == version
        assert (driver.batch is not None) == batches


class TestDevice:
    def test_what_it_is(self, fake: FakeDriver, device: Device) -> None:
        assert Device.count(device.driver) == 2
        assert (device.name, device.capability, device.multiprocessors) == ("Fake H11", (9, 0), 132)

    def test_one_that_is_not_there(self, fake: FakeDriver) -> None:
        with pytest.raises(DriverError, match=r"cuDeviceGet failed .*\(101\); see nvidia-smi"):
            Device(Driver(fake.path), 2)

    def test_the_threads_own_context_is_put_back(self, fake: FakeDriver) -> None:
        device = Device(Driver(fake.path), 0)
        fake.enter_other()
        with contextlib.suppress(KeyError), device.current():
            assert fake.depth == 2
            raise KeyError
        assert fake.depth == 1
        device.close()

    def test_the_context_is_let_go_of_once(self, fake: FakeDriver) -> None:
        device = Device(Driver(fake.path), 0)
        assert fake.retained == 1
        device.close()
        device.close()
        assert fake.retained == 0

    def test_memory_of_the_host(self, fake: FakeDriver, device: Device) -> None:
        device.register(4096, 8192)
        assert fake.log == ["register 8192 3"]  # portable and mapped
        assert device.mapped(4096) == 4096
        with pytest.raises(DriverError, match=r"cuMemHostRegister_v2 .*\(712\); this memory is registered already"):
            device.register(4096, 8192)
        device.unregister(4096)
        with pytest.raises(DriverError, match=r"\(713\); this memory is not registered"):
            device.unregister(4096)


class TestStreams:
    def test_they_are_apart_from_the_default_one_and_no_more_urgent_unless_told(
        self, fake: FakeDriver, device: Device
    ) -> None:
        streams = [Stream(device), Stream(device, urgent=True)]
        assert fake.log == ["stream 1 0", "stream 1 -5"]
        for stream in streams:
            stream.close()

    def test_events_order_streams(self, fake: FakeDriver, device: Device) -> None:
        first, second, event = Stream(device), Stream(device), Event(device)
        first.record(event)
        second.wait(event)
        assert fake.log[2:] == [f"record {event.handle} {first.handle}", f"wait {second.handle} {event.handle}"]
        for each in (first, second, event):
            each.close()

    def test_asking_does_not_wait(self, fake: FakeDriver, device: Device) -> None:
        stream, event = Stream(device), Event(device)
        assert event.query()
        assert stream.query()
        fake.busy(True)
        assert not event.query()
        assert not stream.query()
        fake.busy(False)
        fake.fail("cuEventQuery", 700)
        with pytest.raises(
            DriverError, match=r"cuEventQuery failed .*\(700\); nothing in this process can use the GPU"
        ):
            event.query()
        stream.close()
        event.close()

    def test_other_threads_run_while_one_waits(self, fake: FakeDriver, device: Device) -> None:
        stream, event = Stream(device), Event(device)
        for wait in (stream.synchronize, event.synchronize):
            fake.busy(True)
            # If waiting kept the GIL, the other thread could not go on, and the wait would fail in the end.
            other = threading.Thread(target=fake.end_a_wait, daemon=True)
            other.start()
            wait()
            other.join()
        stream.close()
        event.close()

    def test_what_has_been_closed_is_not_the_default_stream(self, fake: FakeDriver, device: Device) -> None:
        stream, event = Stream(device), Event(device)
        stream.close()
        event.close()
        stream.close()
        before = fake.log
        with pytest.raises(ClosedError, match="this stream has been closed"):
            stream.copy(1, 2, 3)
        with pytest.raises(ClosedError, match="this event has been closed"):
            event.query()
        assert fake.log == before

    def test_a_stream_of_the_engine_stays(self, fake: FakeDriver, device: Device) -> None:
        owned = Stream(device)
        theirs = EngineStream(device, owned.handle)
        assert theirs.query()
        theirs.close()
        assert owned.query()
        owned.close()
        assert EngineStream(device, 0).query()  # the default one


class TestCopies:
    @staticmethod
    def pieces(count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], list[Piece]]:
        source, target = np.arange(count * 8, dtype=np.uint8), np.zeros(count * 8, np.uint8)
        parts = [Piece(address(target) + 8 * i, address(source) + 8 * i, 7) for i in range(count)]
        return source, target, parts

    @pytest.mark.parametrize(
        ("version", "default", "count", "expected"),
        [
            ((12, 8), False, 3, ["batch 3"]),
            ((12, 8), False, 1, ["copy 7"]),
            ((12, 8), False, 0, []),
            ((12, 8), True, 3, ["copy 7"] * 3),
            ((12, 4), False, 3, ["copy 7"] * 3),
        ],
    )
    def test_many_pieces(
        self, fake: FakeDriver, version: tuple[int, int], default: bool, count: int, expected: list[str]
    ) -> None:
        fake.is_for(*version)
        device = Device(Driver(fake.path), 0)
        with device.current():
            stream = EngineStream(device, 0) if default else Stream(device)
            source, target, parts = self.pieces(count)
            before = len(fake.log)
            stream.copy_all(parts)
            assert fake.log[before:] == expected
            want = source.copy()
            want[7::8] = 0  # the last of eight is not part of a piece
            np.testing.assert_array_equal(target, want)
            stream.close()
        device.close()

    def test_an_empty_piece_is_refused(self, device: Device) -> None:
        stream = Stream(device)
        with pytest.raises(GeometryError, match="empty piece"):
            stream.copy_all([Piece(1, 2, 0)])
        stream.close()

    def test_a_batch_that_fails(self, fake: FakeDriver, device: Device) -> None:
        stream = Stream(device)
        fake.fail("cuMemcpyBatchAsync", 700)
        with pytest.raises(DriverError, match=r"^cuMemcpyBatchAsync of 2 pieces failed .*\(700\)"):
            stream.copy_all(self.pieces(2)[2])
        stream.close()

    def test_to_memory_of_the_device_and_back(self, device: Device) -> None:
        there, back = np.arange(1000, dtype=np.uint16), np.zeros(1000, np.uint16)
        stream, memory = Stream(device), Memory(device, there.nbytes)
        assert (memory.nbytes, memory.handle % 256) == (2000, 0)
        stream.copy(memory.handle, address(there), there.nbytes)
        stream.copy(address(back), memory.handle, back.nbytes)
        stream.synchronize()
        np.testing.assert_array_equal(back, there)
        stream.close()
        memory.close()


class TestLaunching:
    def test_arguments_are_packed_as_they_are(self, fake: FakeDriver, device: Device) -> None:
        module, stream = Module(device, CUBIN), Stream(device)
        arguments = (
            ctypes.c_byte(-3),
            ctypes.c_int(-70000),
            ctypes.c_float(0.5),
            ctypes.c_double(1e300),
            ctypes.c_uint64((1 << 64) - 2),
        )
        stream.launch(module.function("packed"), 3, 64, *arguments)
        packed = fake.packed
        assert (packed.a, packed.b, packed.c, packed.d, packed.e) == (-3, -70000, 0.5, 1e300, (1 << 64) - 2)
        assert fake.log[-1] == f"launch packed 3 64 {stream.handle}"
        module.close()
        stream.close()

    @pytest.mark.parametrize(("grid", "threads"), [(0, 32), (1 << 31, 32), (1, 0), (1, 1025)])
    def test_sizes_that_no_device_has(self, device: Device, grid: int, threads: int) -> None:
        stream = Stream(device)
        with pytest.raises(GeometryError, match="a launch of"):
            stream.launch(1, grid, threads)
        stream.close()

    def test_an_argument_of_no_certain_size(self, device: Device) -> None:
        stream = Stream(device)
        with pytest.raises(GeometryError, match="neither a ctypes value nor a structure"):
            stream.launch(1, 1, 32, 5)
        stream.close()

    def test_an_image_that_is_none(self, device: Device) -> None:
        with pytest.raises(DriverError, match=r"cuModuleLoadData failed .*\(200\); the compiled kernels are damaged"):
            Module(device, b"nonsense")

    def test_a_kernel_that_is_not_there(self, device: Device) -> None:
        module = Module(device, CUBIN)
        with pytest.raises(DriverError, match=r"cuModuleGetFunction failed with CUDA_ERROR_NOT_FOUND"):
            module.function("absent")
        module.close()


class TestKernels:
    def test_no_more_blocks_than_there_is_work_or_than_allowed(self, fake: FakeDriver, device: Device) -> None:
        kernels, stream, this = Kernels(device, CUBIN), Stream(device), case(0)
        call = this.call(np.zeros(len(this.planes), np.uint64))
        for warps, allowed, expected in [(1, 8, 1), (16, 8, 1), (17, 8, 2), (1600, 8, 8), (1600, 1, 1)]:
            kernels.gather(call._replace(warps=warps), stream, max_blocks=allowed)
            assert fake.log[-1].split()[2:4] == [str(expected), "512"]
        with pytest.raises(GeometryError, match="at most 0 blocks"):
            kernels.gather(call, stream, max_blocks=0)
        kernels.close()
        stream.close()


USED = sorted({*CALLS, *BRIEF_CALLS} - {"cuGetErrorName", "cuGetErrorString", "cuGetProcAddress_v2"})


@pytest.mark.parametrize("name", USED)
def test_every_call_is_checked(name: str, fake: FakeDriver) -> None:
    fake.fail(name, 2)
    with pytest.raises(DriverError, match=rf"^{name} failed with .*\(2\); leave the engine less memory"):
        use_everything(fake)
    fake.forget()


def test_nothing_fails_where_no_call_does(fake: FakeDriver) -> None:
    use_everything(fake)
    assert (fake.depth, fake.retained) == (0, 0)


def use_everything(fake: FakeDriver) -> None:
    driver = Driver(fake.path)
    Device.count(driver)
    device = Device(driver, 0)
    with device.current():
        stream, event, memory, module = Stream(device), Event(device), Memory(device, 100), Module(device, CUBIN)
        stream.launch(module.function("packed"), 1, 32, *(ctypes.c_uint64(0) for _ in range(5)))
        stream.record(event)
        stream.wait(event)
        stream.query()
        event.query()
        stream.copy(memory.handle, memory.handle + 50, 50)
        stream.synchronize()
        event.synchronize()
        device.register(4096, 4096)
        device.mapped(4096)
        device.unregister(4096)
        for each in (stream, event, memory, module):
            each.close()
    device.close()


def test_importing_loads_no_library_and_no_torch() -> None:
    code = (
        "import pkgutil, sys, importlib, lmcache_cuda\n"
        "names = [each.name for each in pkgutil.iter_modules(lmcache_cuda.__path__)]\n"
        "for name in names: importlib.import_module('lmcache_cuda.' + name)\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'lmcache_cuda.driver' in sys.modules and 'lmcache_cuda.nvrtc' in sys.modules\n"
        "print([name for name in ('libcuda', 'libnvrtc') if name in maps], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[] False", "")
