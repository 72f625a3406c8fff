"""The compiler: the real one where it is installed, and one that compiles nothing for all that goes wrong."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cuda import compiling, nvrtc
from lmcache_cuda.compiling import compile_kernels
from lmcache_cuda.errors import CompileError, UnavailableError
from lmcache_cuda.geometry import WIDTHS, KvCopy
from lmcache_cuda.nvrtc import Nvrtc, find_compiler, target_of
from tests.cuda.cubin import Kernel, kernels
from tests.cuda.host import COMPILER, HERE, WITHOUT_COMPILER

TARGETS = [(8, 0), (9, 0), (10, 0), (12, 0)]


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    try:
        return find_compiler((9, 0))[0]
    except UnavailableError as missing:
        pytest.skip(f"NVRTC is missing: {missing}")


class TestReal:
    @pytest.mark.parametrize("capability", TARGETS)
    def test_the_kernels_compile_without_a_gpu(
        self, compiler: Nvrtc, capability: tuple[int, int], tmp_path: Path
    ) -> None:
        number = 10 * capability[0] + capability[1]
        if number not in compiler.architectures():
            pytest.skip(f"sm_{number} is missing from {compiler}")
        cubin = compile_kernels(capability, cache=tmp_path)
        # What does not fit into registers would be right, and slow.
        expected = Kernel(parameter_bytes=ctypes.sizeof(KvCopy), frame_bytes=0)
        names = {f"kv_{verb}_{width}" for verb in ("gather", "scatter") for width in WIDTHS}
        assert kernels(cubin) == dict.fromkeys(names, expected)
        assert compile_kernels(capability, cache=tmp_path) == cubin

    def test_that_registers_do_not_suffice_is_seen(self, compiler: Nvrtc) -> None:
        source = """
            extern "C" __global__ void greedy(int* a, long long) {
                int own[64];
                for (int i = 0; i < 64; ++i) own[i] = i;
                for (int i = 0; i < 1000; ++i) own[a[i] & 63] += own[i & 63];
                for (int i = 0; i < 64; ++i) a[i] = own[i];
            }"""
        assert kernels(compiler.compile(source, "greedy.cu", "sm_90")) == {"greedy": Kernel(16, 256)}

    def test_a_mistake_in_the_source_is_shown(self, compiler: Nvrtc) -> None:
        with pytest.raises(CompileError, match=r"bad.cu does not compile for sm_90 with NVRTC 1[\s\S]*bad.cu\(2\)"):
            compiler.compile("\n__global__ void kernel() { oops(); }", "bad.cu", "sm_90")

    @pytest.mark.parametrize(("target", "option"), [("sm_17", "--std=c++17"), ("sm_90", "--no-such-option")])
    def test_an_architecture_or_option_that_there_is_not(self, compiler: Nvrtc, target: str, option: str) -> None:
        with pytest.raises(CompileError, match=f"does not compile for {target}"):
            compiler.compile("", "empty.cu", target, [option])


@pytest.mark.parametrize(
    ("capability", "known", "expected"),
    [
        ((9, 0), [80, 90, 100], "sm_90"),
        ((8, 9), [80, 86, 90], "sm_86"),
        ((10, 3), [90, 100, 120], "sm_100"),
        ((12, 1), [120, 121], "sm_121"),
        ((8, 0), [86, 90], None),  # what is for 8.6 does not run on 8.0
        ((11, 0), [90, 100, 120], None),
    ],
)
def test_the_architecture_to_compile_for(capability: tuple[int, int], known: list[int], expected: str | None) -> None:
    assert target_of(capability, known) == expected


Make = Callable[..., str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds compilers, each kind once."""
    place = tmp_path_factory.mktemp("nvrtc")

    @functools.cache
    def build(*options: str) -> Path:
        library = place / f"{len(list(place.iterdir()))}.so"
        source = str(HERE / "fake_nvrtc.cc")
        subprocess.run([str(COMPILER), *options, "-shared", "-fPIC", "-w", "-o", str(library), source], check=True)
        return library

    return build


@pytest.fixture
def make(built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a compiler; those made are all that there are, newest first."""
    if COMPILER is None:
        pytest.skip(WITHOUT_COMPILER)
    made: list[tuple[int, str]] = []
    monkeypatch.setattr(nvrtc, "candidates", lambda: (path for _, path in sorted(made, reverse=True)))

    def build(*options: str, major: int = 12, architectures: str = "80,86,90,100,120") -> str:
        library = tmp_path / f"libnvrtc-{len(made)}.so.{major}"
        # A file of its own is loaded as a library of its own, that counts anew.
        shutil.copy(built(f"-DMAJOR={major}", f"-DARCHITECTURES={architectures}", *options), library)
        made.append((major, str(library)))
        return str(library)

    return build


def compiled(library: str) -> int:
    return int(ctypes.CDLL(library).fake_compiled())


class TestFinding:
    def test_without_any_the_extra_is_named(self, make: Make) -> None:
        with pytest.raises(UnavailableError) as missing:
            find_compiler((9, 0))
        assert str(missing.value) == (
            "no compiler for GPUs of compute capability 9.0: NVRTC is not on this machine; "
            "install one with pip install 'lmcache-core[cuda]'"
        )

    def test_the_newest_that_the_driver_takes(self, make: Make) -> None:
        old, new = make(major=12), make(major=13)
        assert find_compiler((9, 0))[0].path == new
        assert find_compiler((9, 0), driver=(13, 0))[0].path == new
        assert find_compiler((9, 0), driver=(12, 4))[0].path == old

    def test_one_that_knows_the_gpu(self, make: Make) -> None:
        old, _ = make(major=12, architectures="70,80"), make(major=13, architectures="90,100")
        compiler, target = find_compiler((8, 6))
        assert (compiler.path, target) == (old, "sm_80")

    def test_why_each_would_not_do(self, make: Make) -> None:
        make(major=11), make(major=12, architectures="80"), make(major=13)
        with pytest.raises(UnavailableError) as missing:
            find_compiler((9, 0), driver=(12, 2))
        for part in (
            "NVRTC 11.9 (",
            "is older than 12.0",
            "NVRTC 12.9 (",
            "does not know GPUs of compute capability 9.0",
            "NVRTC 13.9 (",
            "is too new for a driver for CUDA 12.2",
            "pip install 'lmcache-core[cuda]'",
        ):
            assert part in str(missing.value)

    def test_a_library_that_is_none(self, make: Make, tmp_path: Path) -> None:
        Path(make(major=13)).write_bytes(b"nothing")
        good = make(major=12)
        assert find_compiler((9, 0))[0].path == good

    def test_its_other_half_is_loaded_from_beside_it(self, make: Make, tmp_path: Path) -> None:
        library, half = make(), tmp_path / "libnvrtc-builtins.so.12.9"
        shutil.copy(library, half)
        assert str(half) not in Path("/proc/self/maps").read_text()
        assert find_compiler((9, 0))[0].path == library
        assert str(half) in Path("/proc/self/maps").read_text()

    def test_its_other_half_is_damaged(self, make: Make, tmp_path: Path) -> None:
        make()
        (tmp_path / "libnvrtc-builtins.so.12.9").write_bytes(b"nothing")
        with pytest.raises(UnavailableError, match=r"libnvrtc-0.so.12 cannot be loaded"):
            find_compiler((9, 0))

    def test_where_they_are_looked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the wheels of two CUDAs, and in a toolkit; what ends otherwise is left alone."""
        for name in (
            "wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "wheels/nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12",
            "wheels/nvidia/cu13/lib/libnvrtc.so.13",
            "wheels/nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
            "toolkit/lib64/libnvrtc.so.12.9.86",
            "toolkit/lib64/libnvrtc.so.12",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        monkeypatch.syspath_prepend(str(tmp_path / "wheels"))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
        found = [path for path in nvrtc.candidates() if path.startswith(str(tmp_path))]
        assert [str(Path(path).relative_to(tmp_path)) for path in found] == [
            "wheels/nvidia/cu13/lib/libnvrtc.so.13",
            "wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "toolkit/lib64/libnvrtc.so.12",
        ]
        assert list(nvrtc.candidates())[-2:] == ["libnvrtc.so.13", "libnvrtc.so.12"]


class TestCompiling:
    def test_what_the_compiler_is_told(self, make: Make, tmp_path: Path) -> None:
        make()
        cubin = compile_kernels((8, 9), cache=tmp_path / "cache")
        assert cubin == b"\x7fELF --gpu-architecture=sm_86 --std=c++17 1"

    def test_once_a_machine(self, make: Make, tmp_path: Path) -> None:
        library = make()
        first = compile_kernels((9, 0), cache=tmp_path / "cache")
        assert compile_kernels((9, 0), cache=tmp_path / "cache") == first
        assert compiled(library) == 1

    def test_again_for_another_source_option_version_or_gpu(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library, cache = make(), tmp_path / "cache"
        compile_kernels((9, 0), cache=cache)
        compile_kernels((8, 0), cache=cache)
        assert compiled(library) == 2
        monkeypatch.setattr(compiling, "OPTIONS", ("--std=c++20",))
        compile_kernels((9, 0), cache=cache)
        assert compiled(library) == 3
        monkeypatch.setattr(compiling, "kernel_source", lambda: "another")
        compile_kernels((9, 0), cache=cache)
        assert compiled(library) == 4
        newer = make(major=13)
        compile_kernels((9, 0), cache=cache)
        assert (compiled(library), compiled(newer)) == (4, 1)
        assert len(list(cache.iterdir())) == 5

    def test_a_failure_is_not_kept(self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make()
        monkeypatch.setattr(compiling, "kernel_source", lambda: "a mistake")
        with pytest.raises(
            CompileError, match=r"kernels.cu does not compile for sm_90 .*: kernels.cu\(3\): error: a mis"
        ):
            compile_kernels((9, 0), cache=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_a_size_that_cannot_be_is_not_allocated(self, make: Make, tmp_path: Path) -> None:
        make("-DHUGE_CUBIN")
        with pytest.raises(CompileError, match=r"is 1099511627776 B; at most 16777216 are taken"):
            compile_kernels((9, 0), cache=tmp_path / "cache")

    def test_by_default_it_is_kept_for_the_user(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        compile_kernels((9, 0))
        assert len(list((tmp_path / "xdg/lmcache-core/cubins").iterdir())) == 1
