"""The kit fails each of many broken backends, in the test that is about what is broken."""

import pytest
from hypothesis import Phase, settings

from lmcache_core.testing import MODEL_SETTINGS, StorageBackendTests, run_model
from tests.testing.broken import (
    CAUGHT_BY,
    DeleteBringsBackTheOldValue,
    HitsForAnySize,
    IgnoresTheSpace,
    KeepsTheOldValue,
    RaisesForAnAbsentKey,
    WritesPastTheBuffer,
)
from tests.testing.broken_life import ForgetsWhenReopened
from tests.testing.broken_lists import (
    DropsTheOldValueFirst,
    RenewsWhatIsAskedFor,
    ScansBackwards,
    ScansWithoutParents,
    TouchesInReverse,
)
from tests.testing.reference import Medium, ReferenceBackend

pytest_plugins = ["pytester"]

MODULE = """
import pytest
from lmcache_core.testing import StorageBackendTests
from {module} import {name}
from tests.testing.reference import Medium

class TestBroken(StorageBackendTests):
    persistent = True
    deadline = 1.0

    @pytest.fixture
    def medium(self):
        return Medium()

    @pytest.fixture
    def backend_factory(self, medium):
        return lambda: {name}(medium)

    @pytest.fixture
    def bounded_factory(self):
        medium = Medium(capacity=1 << 20)
        return lambda: {name}(medium)

    @pytest.fixture
    def raw_read(self, medium):
        return medium.read

    @pytest.fixture
    def raw_write(self, medium):
        return medium.write

    @pytest.fixture
    def raw_corrupt(self, medium):
        return medium.corrupt
"""


@pytest.mark.parametrize(("backend", "test"), CAUGHT_BY.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_kit_fails(
    pytester: pytest.Pytester, backend: type[ReferenceBackend], test: str, blocking_calls: list[str]
) -> None:
    path = pytester.makepyfile(MODULE.format(name=backend.__name__, module=backend.__module__))
    # Strict mode, and none of this project's settings: as for an author who has configured nothing.
    options = ["--import-mode=importlib", "-o", "asyncio_default_fixture_loop_scope=function"]
    _, skipped, failed = pytester.inline_run(*options, f"{path}::TestBroken::{test}").countoutcomes()
    assert failed >= 1
    assert skipped == 0
    blocking_calls.clear()  # some block on purpose


def test_every_test_of_the_kit_can_fail() -> None:
    tests = {name for name in dir(StorageBackendTests) if name.startswith("test_")}
    below = {"test_behaves_like_a_dict_when_nearly_full"}
    assert set(CAUGHT_BY.values()) == tests - below


MODEL_CATCHES = [
    DeleteBringsBackTheOldValue,
    ForgetsWhenReopened,
    HitsForAnySize,
    IgnoresTheSpace,
    KeepsTheOldValue,
    RaisesForAnAbsentKey,
    RenewsWhatIsAskedFor,
    ScansBackwards,
    ScansWithoutParents,
    TouchesInReverse,
    WritesPastTheBuffer,
]


@pytest.mark.parametrize("backend", MODEL_CATCHES)
def test_the_model_alone_catches(backend: type[ReferenceBackend]) -> None:
    medium = Medium()
    # Many, as what is drawn depends on the constants of all modules that are loaded. The first that finds it ends it.
    only_generate = settings(MODEL_SETTINGS, phases=[Phase.generate], derandomize=True, max_examples=1000)
    with pytest.raises((AssertionError, KeyError)):
        run_model(lambda: backend(medium), persistent=True, settings=only_generate)


def test_the_model_alone_catches_what_is_lost_when_full() -> None:
    medium = Medium(capacity=1 << 20)
    only_generate = settings(MODEL_SETTINGS, phases=[Phase.generate], derandomize=True, max_examples=1000)
    with pytest.raises(AssertionError):
        run_model(lambda: DropsTheOldValueFirst(medium), persistent=True, fill=True, settings=only_generate)
