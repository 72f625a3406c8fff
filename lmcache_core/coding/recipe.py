"""What a tier's settings ask of its coding, checked against what is installed and what its backend can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lmcache_core.coding.codecs import load_codec
from lmcache_core.config import TierConfig
from lmcache_core.config.keys import key_of
from lmcache_core.errors import ConfigError
from lmcache_core.frame import Codec
from lmcache_core.protocols import ReadsShorter, StorageBackend

if TYPE_CHECKING:
    from lmcache_core.coding.cipher import Keyring

__all__ = ["Recipe", "check_packages", "recipe_of"]


class Recipe(NamedTuple):
    """How a tier's chunks are coded."""

    codec: Codec = Codec.NONE
    keys: Keyring | None = None
    """None where nothing is encrypted."""

    @property
    def plain(self) -> bool:
        """Whether chunks are stored as they are."""
        return not self.codec and self.keys is None


def check_packages(place: str, tier: TierConfig) -> None:
    """See that what a tier's coding needs is installed.

    Raises:
        ConfigError: It is not; the message says what to install.
    """
    codec = Codec[tier.codec.upper()]
    try:
        if codec:
            load_codec(codec)
    except ImportError as error:
        raise _lacks(f"{place}.codec", tier.codec, tier.codec, error) from None
    if tier.cipher is not None:
        try:
            import lmcache_core.coding.cipher  # noqa: F401  for those who encrypt
        except ImportError as error:
            raise _lacks(f"{place}.cipher", "encryption", "crypto", error) from None


def recipe_of(place: str, tier: TierConfig, backend: StorageBackend) -> Recipe:
    """The recipe of the tier whose settings are at `place`.

    Raises:
        ConfigError: It cannot be followed; the message says what to change or to install.
    """
    codec = Codec[tier.codec.upper()]
    if codec and not isinstance(backend, ReadsShorter):
        raise ConfigError(
            f"{place}.codec: backend {tier.backend!r} reads values of exact sizes only, and compressed chunks have any "
            "size; write 'codec: none'"
        )
    check_packages(place, tier)
    return Recipe(codec, None if tier.cipher is None else _keyring(place, tier))


def _keyring(place: str, tier: TierConfig) -> Keyring:
    from lmcache_core.coding.cipher import Keyring  # for those who encrypt

    config = tier.cipher
    assert config is not None
    try:
        return Keyring(
            key_of(config.key),
            [key_of(text) for text in config.older],
            {name: key_of(text) for name, text in config.tenants.items()},
        )
    except ValueError as error:  # settings from code that nobody has checked
        raise ConfigError(f"{place}.cipher: a key {error}") from None


def _lacks(place: str, what: str, extra: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{place}: {what} needs a package that cannot be imported ({error}); install it: "
        f"pip install 'lmcache-core[{extra}]'"
    )
