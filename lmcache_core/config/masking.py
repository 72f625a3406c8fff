"""Secrets never reach a screen: text that hides itself, and URLs without their passwords."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

MASK = "***"

# Greedy: a password may hold any of `/`, `:`, `@` and quotes.
_USERINFO = re.compile(r"://(\S*)@")
_PARAMETER = re.compile(r"(?i)\b([a-z_-]*(?:password|passwd|secret|token|access_?key)[a-z_-]*=)[^&\s'\"]+")


class LooseText(str):
    """Text from the environment or a file. It may stand for a number or a truth value, where one is expected."""

    __slots__ = ()


class MaskedText(LooseText):
    """A secret. Ordinary text to everyone who uses it, except that its repr tells nothing."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"'{MASK}'"


def _mask_userinfo(match: re.Match[str]) -> str:
    user, colon, _ = match[1].partition(":")
    return f"://{user}:{MASK}@" if colon else f"://{MASK}@"


def mask_url(text: str) -> str:
    """`text` with the passwords of all URLs in it replaced."""
    return _PARAMETER.sub(rf"\g<1>{MASK}", _USERINFO.sub(_mask_userinfo, text))


def mask(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without passwords in URLs and without `secrets`, for errors: others write them, with values in them."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        # A short one would be found within ordinary words.
        pattern = re.escape(secret) if len(secret) > 3 else rf"(?<!\w){re.escape(secret)}(?!\w)"
        if secret:
            text = re.sub(pattern, MASK, text)
    return mask_url(text)


def masked_in(value: object) -> Iterator[str]:
    """All secrets inside of plain data."""
    if isinstance(value, MaskedText):
        yield str(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from masked_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from masked_in(item)
