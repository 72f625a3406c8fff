"""A GlusterFS volume that the tests share, mounted as two hosts would mount it."""

import itertools
from collections.abc import Iterator

import pytest

from tests.backends.nfs.kit import Two
from tests.servers import gluster

_numbers = itertools.count()


@pytest.fixture(scope="session")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gluster.Volume]:
    if missing := gluster.lacking():
        pytest.skip(missing)
    with gluster.volume(tmp_path_factory.mktemp("gluster") / "volume") as made:
        yield made


@pytest.fixture
def shared(volume: gluster.Volume) -> Two:
    """A directory of this test's own, by all mounts."""
    name = f"test{next(_numbers)}"
    return Two(volume.one.path / name, volume.two.path / name, volume.true.path / name)
