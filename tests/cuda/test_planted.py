"""Mistakes planted in the kernels: what compares them must notice each, and so must the sanitizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cuda.host import COMPILER, SOURCE, WITHOUT_COMPILER, build

pytestmark = [pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]

PLANTS = {
    "units that are not there are copied": ("if (number < 0) continue;", ""),
    "every other item is left out": ("item += gridDim.x * warps", "item += 2 * gridDim.x * warps"),
    "the last item is left out": ("item < items;", "item + 1 < items;"),
    "all tokens of a block are its first": ("(u32)number % block_units * c.unit_stride", "0"),
    "all blocks are the first": ("(u32)number / block_units * c.block_stride", "0"),
    "pages lie over each other": ("unit / page_units * c.chunk_page_stride", "0"),
    "a page never ends": ("unit % page_units * c.chunk_unit_stride", "unit * c.chunk_unit_stride"),
    "planes lie over each other": ("+ plane * c.chunk_plane_stride", ""),
    "one plane is copied for another": ("c.planes[plane]", "c.planes[0]"),
    "planes and units are mixed up": (
        "plane = row / units, unit = row % units",
        "plane = row % (u32)c.n_planes, unit = row % units",
    ),
    "parts overlap": ("part * (LANES * IN_FLIGHT) + lane", "part * LANES + lane"),
    "the rest of a unit is left out": ("(vectors + LANES * IN_FLIGHT - 1)", "vectors"),
    "one access in four is left out": ("for (int k = 0; k < IN_FLIGHT; ++k)", "for (int k = 1; k < IN_FLIGHT; ++k)"),
    "runs are not told from units": ("if (vectors != run)", "if (vectors == 0)"),
    "an axis is never left": ("rest /= size;", ""),
    "an axis never ends": ("rest % size * c.axis_stride", "rest * c.axis_stride"),
    "axes are walked inside out": ("axis = AXES - 1; axis >= 0; --axis", "axis = 0; axis < AXES; ++axis"),
    "the outermost axis is left out": ("axis >= 0; --axis", "axis >= 1; --axis"),
    "a run never ends": ("(i64)(at % run)", "(i64)at"),
    "the last access is too long": ("if (at < vectors) __stcs", "if (at <= vectors) __stcs"),
    "an access is wider than said": ("KV_KERNELS(8, uint2)", "KV_KERNELS(8, uint4)"),
    "scatter copies to the chunk": (
        "GATHER ? flat + at * sizeof(Vec) : paged + offset[k]",
        "true ? flat + at * sizeof(Vec) : paged + offset[k]",
    ),
    "gather reads the chunk": (
        "GATHER ? paged + offset[k] : flat + at * sizeof(Vec)",
        "false ? paged + offset[k] : flat + at * sizeof(Vec)",
    ),
}

SEEN_BY_SANITIZERS = {
    "the last read is too long": ("if (at < vectors) held[k]", "if (at <= vectors) held[k]"),
    "an access is not aligned": ("KV_KERNELS(1, unsigned char)", "KV_KERNELS(1, unsigned short)"),
}


class Verdict(NamedTuple):
    code: int
    """As processes end: 0 if all was well."""
    told: str


def planted(what: str, mistake: tuple[str, str]) -> str:
    source = SOURCE.read_text()
    assert mistake[0] in source, f"{what}: the kernels have changed; plant it anew"
    return source.replace(*mistake)


def verdicts(
    place: Path, mistakes: dict[str, tuple[str, str]], *options: str, seeds: int, **environment: str
) -> dict[str, Verdict]:
    """What comes of the kernels with each of the mistakes, and without one."""
    libraries = {what: place / f"{number}.so" for number, what in enumerate(["", *mistakes])}
    for what, library in libraries.items():
        # A mistake may leave something unused; that the compiler says so does not count.
        build(library, "-w", *options, source=planted(what, mistakes[what]) if what else None)
    command = [sys.executable, "-m", "tests.cuda.host", str(seeds), *map(str, libraries.values())]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cuda")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths, **environment}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = (library.with_suffix(".err").read_text() for library in libraries.values())
    return dict(zip(libraries, map(Verdict, json.loads(done.stdout), told), strict=True))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    return verdicts(tmp_path_factory.mktemp("planted"), PLANTS, "-O0", seeds=100)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    assert COMPILER is not None
    found = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    preload = found.stdout.strip()
    if not Path(preload).is_absolute():
        pytest.skip("libasan of g++ is missing")
    # All that Python and numpy allocate has guards around it then; what they leak is not ours.
    place = tmp_path_factory.mktemp("sanitized")
    environment = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    return verdicts(place, SEEN_BY_SANITIZERS, *SANITIZE, seeds=100, **environment)


def test_without_a_mistake_nothing_is_noticed(compared: dict[str, Verdict]) -> None:
    assert compared[""] == (0, "")


@pytest.mark.parametrize("what", PLANTS)
def test_a_mistake_is_noticed(what: str, compared: dict[str, Verdict]) -> None:
    code, told = compared[what]
    assert (code == 1 and "Mismatched elements" in told) or code < 0, told


def test_the_kernels_are_clean_under_sanitizers(sanitized: dict[str, Verdict]) -> None:
    assert sanitized[""] == (0, "")


@pytest.mark.parametrize("what", SEEN_BY_SANITIZERS)
def test_sanitizers_see_what_comparing_cannot(what: str, sanitized: dict[str, Verdict]) -> None:
    assert "ERROR: AddressSanitizer" in sanitized[what].told or "runtime error" in sanitized[what].told
