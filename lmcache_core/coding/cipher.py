"""Encryption of pages: AES-256-GCM, with a key of its own for each frame.

A frame's key is `HKDF-SHA256(key, salt, "lmcache-core frame")` with a random salt of 32 bytes, so that the number of
page and shard can be the nonce: no two pages are ever encrypted with the same key and nonce. Authenticated beside each
page is `frame.identity`: nothing can be moved to another page, shard, chunk, namespace or key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lmcache_core.frame import KEY_ID

__all__ = ["FrameCipher", "Key", "Keyring"]

_NONCE = struct.Struct("<IQ")
_INFO = b"lmcache-core frame"
_ID = b"lmcache-core key id\0"


class Key:
    """A key of 32 bytes. Its id tells nothing of it."""

    __slots__ = ("_secret", "id", "tenant")

    def __init__(self, secret: bytes, tenant: str = "") -> None:
        self._secret = secret
        self.tenant = tenant
        """Whose it is."""
        self.id = hashlib.sha256(_ID + secret).digest()[:KEY_ID]

    def __repr__(self) -> str:
        return f"<Key {self.id.hex()}>"

    def frame(self, salt: bytes, identity: bytes) -> FrameCipher:
        """The cipher for one frame."""
        return FrameCipher(HKDF(SHA256(), 32, salt, _INFO).derive(self._secret), identity)


class FrameCipher:
    """Encrypts and decrypts the pages of one frame."""

    def __init__(self, key: bytes, identity: bytes) -> None:
        self._algorithm = algorithms.AES256(key)
        self._identity = identity

    def encrypt(self, shard: int, page: int, source: memoryview, into: memoryview) -> bytes:
        """Put a page, encrypted, into a buffer of its size, which may be where it lies. Returns its tag."""
        encryptor = Cipher(self._algorithm, modes.GCM(_NONCE.pack(shard, page))).encryptor()
        encryptor.authenticate_additional_data(self._identity)
        encryptor.update_into(source, into)
        encryptor.finalize()
        return encryptor.tag

    def decrypt(self, shard: int, page: int, data: memoryview, tag: bytes) -> bool:
        """Decrypt a page where it lies. Returns whether it is what was encrypted; if not there is garbage now."""
        decryptor = Cipher(self._algorithm, modes.GCM(_NONCE.pack(shard, page), tag)).decryptor()
        decryptor.authenticate_additional_data(self._identity)
        decryptor.update_into(data, data)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True


class Keyring:
    """All keys of a tier.

    Args:
        key: For chunks of those who have no key of their own.
        older: Keys that nothing is encrypted with any more.
        tenants: Keys of tenants, by name.
    """

    def __init__(self, key: bytes, older: Sequence[bytes] = (), tenants: Mapping[str, bytes] | None = None) -> None:
        self._key = Key(key)
        self._tenants = {name: Key(secret, name) for name, secret in (tenants or {}).items()}
        self._known = {each.id: each for each in (*map(Key, older), *self._tenants.values(), self._key)}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._known.values())

    def writing(self, tenant: str = "") -> Key:
        """What a tenant's chunks are encrypted with, or all others."""
        return self._tenants.get(tenant, self._key)

    def find(self, key_id: bytes) -> Key | None:
        """The key with that id."""
        return self._known.get(key_id)
