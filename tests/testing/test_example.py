"""The example is a package that installs, is found by its name, passes the kit, and serves a node as a tier."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lmcache-backend-sqlite"
MODULE = EXAMPLE / "lmcache_backend_sqlite.py"

TIER = """
tiers:
  - backend: sqlite
    path: {path}
"""

USE_AS_TIER = """
import sys
from pathlib import Path
from lmcache_core import Cache, Encoding, Group, GroupKind, Namespace

PAGE = 16 * 1024
group = Group(
    kind=GroupKind.FULL, layers=(0, 1), page_layer_bytes=PAGE // 2, dtype="bfloat16", kv_heads=1, head_size=32
)
namespace = Namespace(
    weights="0" * 64, groups=(group,), page_tokens=64, encoding=Encoding(layout="canonical"), model_name="none"
)

class View:
    def __init__(self, memory):
        self.memory = memory
    def gather(self, group, first_page, pages, into):
        into[:] = self.memory[first_page * PAGE : (first_page + pages) * PAGE]
    def scatter(self, group, first_page, pages, source):
        self.memory[first_page * PAGE : (first_page + pages) * PAGE] = source

kv = bytes(i * 7 % 251 for i in range(10 * PAGE))
with Cache.open(Path(sys.argv[1]).read_text(), namespace) as cache:
    if sys.argv[2] == "store":
        print(cache.store(range(640), View(bytearray(kv))).wait(30))
    else:
        view = View(bytearray(10 * PAGE))
        print(dict(cache.retrieve(range(640), view).tiers), view.memory == kv)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the example and nothing else installed, without any download."""
    work = tmp_path_factory.mktemp("example")
    source, site = work / "source", work / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "dist", "build"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(site), str(source))
    return site


def run(*command: str, site: Path | None = None, cwd: Path | None = None) -> str:
    """What a command printed; it must succeed."""
    path = [str(site)] if site else []
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT), str(ROOT / "backends")])}
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_short() -> None:
    lines = [line for line in MODULE.read_text().splitlines() if line.strip()]
    assert len(lines) < 150
    tests = (EXAMPLE / "tests" / "test_sqlite.py").read_text().split("class TestSqliteBackend")[1].split("\n\n\n")[0]
    assert len([line for line in tests.splitlines() if line.strip()]) <= 15


def test_nothing_else_is_installed_with_it(installed: Path) -> None:
    names = {path.name for path in installed.iterdir()} - {"__pycache__"}
    assert names == {"lmcache_backend_sqlite.py", "lmcache_backend_sqlite-0.1.0.dist-info"}


def test_it_is_found_by_its_name(installed: Path) -> None:
    code = """
from lmcache_core.plugins import list_backends, load_backend
plugin = load_backend("sqlite")
print(type(plugin.create(plugin.options_type(path="/tmp/x"))).__name__)
print([(i.name, i.distribution, i.version, i.error) for i in list_backends() if i.name == "sqlite"])
"""
    found = run(sys.executable, "-c", code, site=installed).splitlines()
    assert found == ["SqliteBackend", "[('sqlite', 'lmcache-backend-sqlite', '0.1.0', None)]"]


@pytest.mark.slow
def test_it_passes_the_kit(installed: Path) -> None:
    tests = installed.parent / "source"
    (tests / MODULE.name).unlink(missing_ok=True)  # what is tested is what was installed
    out = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests", site=installed, cwd=tests)
    summary = out.strip().splitlines()[-1]
    assert "passed" in summary
    assert "failed" not in summary


def test_two_lines_of_yaml_make_it_a_tier_that_survives_a_restart(installed: Path, tmp_path: Path) -> None:
    config, script = tmp_path / "kv.yaml", tmp_path / "use.py"
    config.write_text(TIER.format(path=tmp_path / "kv.sqlite") + "cpu: {capacity: 64MiB}\n")
    script.write_text(USE_AS_TIER)
    assert run(sys.executable, str(script), str(config), "store", site=installed) == "True\n"
    assert run(sys.executable, str(script), str(config), "restore", site=installed) == "{'sqlite': 640} True\n"
