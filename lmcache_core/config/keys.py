"""Keys for encryption, as they are written in the configuration."""

from __future__ import annotations

import base64
import binascii

KEY_BYTES = 32


def key_of(text: str) -> bytes:
    """The key that a text in base64 stands for.

    Raises:
        ValueError: It is none; the message says why, and nothing of what it holds.
    """
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is not base64") from None
    if len(key) != KEY_BYTES:
        raise ValueError(f"has {len(key)} bytes instead of {KEY_BYTES}")
    return key
