"""What docs/writing-a-backend.md shows is a package that installs and passes; what it names exists."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core import protocols, testing, wrappers
from lmcache_core.config import load_config
from lmcache_core.plugins import load_backend
from lmcache_core.protocols import StorageBackend
from lmcache_core.testing import StorageBackendTests

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text()
FILES = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, with the package installed into `site` below them."""
    source = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "install", "-q", *offline, "--target", "site", ".", cwd=source)
    (source / "lmcache_backend_files.py").unlink()
    return source


def run(*command: str, cwd: Path) -> str:
    path = os.pathsep.join([str(cwd / "site"), str(ROOT), str(ROOT / "backends")])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=cwd, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_shows_a_whole_package() -> None:
    assert list(FILES) == ["pyproject.toml", "lmcache_backend_files.py", "tests/test_files.py", "tests/test_longer.py"]


@pytest.mark.slow
def test_its_backend_passes_the_kit(package: Path) -> None:
    out = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests", cwd=package)
    assert re.search(r"^\d+ passed, \d+ skipped", out.splitlines()[-1])


@pytest.mark.slow
def test_the_kit_fails_it_when_its_calls_end_before_their_threads(package: Path) -> None:
    module = package / "mutated" / "lmcache_backend_files.py"
    module.parent.mkdir()
    module.write_text(FILES[module.name].replace("_threads.finish(", "_threads.run("))
    code = "import sys, pytest; sys.path.insert(0, 'mutated'); pytest.main(sys.argv[1:])"
    out = run(sys.executable, "-c", code, "-p", "no:cacheprovider", "-q", "-k", "cancelled", "tests", cwd=package)
    assert re.search(r"^FAILED .*test_a_cancelled_", out, re.MULTILINE)


def test_its_yaml_names_its_backend(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (yaml,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.syspath_prepend(str(package / "site"))
    load_backend.cache_clear()
    (tier,) = load_config(yaml, env={}).config.tiers
    load_backend.cache_clear()
    assert (tier.backend, tier.options.path, tier.options.threads) == ("files", "/mnt/kv", 4)


def test_its_python_is_what_ruff_would_write(tmp_path: Path) -> None:
    for name, text in FILES.items():
        if name.endswith(".py"):
            path = tmp_path / Path(name).name
            path.write_text(text)
            options = ["--line-length", "120", "--target-version", "py311", "--isolated"]
            run(sys.executable, "-m", "ruff", "format", "--diff", "-q", *options, str(path), cwd=ROOT)


def test_every_test_it_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) >= 12
    assert named <= set(dir(StorageBackendTests))


def test_every_verb_and_capability_is_there() -> None:
    verbs = [name for name, value in vars(StorageBackend).items() if inspect.iscoroutinefunction(value)]
    assert [verb for verb in verbs if f"| `{verb}(" not in PAGE] == []
    capabilities = [
        name
        for name, value in vars(protocols).items()
        if getattr(value, "_is_runtime_protocol", False) and name not in ("StorageBackend", "KVView", "Transfer")
    ]
    assert [name for name in capabilities if f"| `{name}` |" not in PAGE] == []


def test_every_fixture_and_wrapper_it_names_exists() -> None:
    for name in (
        "backend_factory",
        "bounded_factory",
        "raw_read",
        "raw_write",
        "raw_corrupt",
        "persistent",
        "deadline",
    ):
        assert f"`{name}`" in PAGE
        assert hasattr(StorageBackendTests, name)
    for name in ("BackendModel", "StorageBackendTests"):
        assert f"`{name}`" in PAGE
        assert hasattr(testing, name)
    for name in ("Faulty", "Slow", "Corrupting"):
        assert f"`{name}`" in PAGE
        assert hasattr(wrappers, name)
