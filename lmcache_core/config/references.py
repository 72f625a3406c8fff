"""Secrets from elsewhere: `${env:NAME}` and `${file:/run/secrets/name}` inside any text of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from lmcache_core.config.conversion import InvalidSetting, Key, dotted
from lmcache_core.config.masking import LooseText, MaskedText

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
_MEANT = re.compile(r"\$\{(?:(?:env|file):.*|[A-Z_][A-Z0-9_]*\})")
_MAX_FILE = 2**16


def resolve(key: Key, value: object, env: Mapping[str, str], hidden: set[Key]) -> object:
    """`value` with all references replaced. Places that had one are added to `hidden`.

    Raises:
        InvalidSetting: A variable isn't set, a file can't be read, or a reference is of another form.
    """
    if isinstance(value, dict):
        return {name: resolve((*key, name), item, env, hidden) for name, item in value.items()}
    if isinstance(value, list):
        return [resolve((*key, number), item, env, hidden) for number, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    found = False

    def replace(match: re.Match[str]) -> str:
        nonlocal found
        if match[0] == "$${":
            return "${"
        found = True
        return _lookup(key, match[0], match[1], env)

    text = _REFERENCE.sub(replace, value)
    if found:
        hidden.add(key)
        return MaskedText(text)
    return LooseText(text) if isinstance(value, LooseText) else text


def _lookup(key: Key, written: str, inside: str, env: Mapping[str, str]) -> str:
    kind, _, name = inside.partition(":")
    if not written.endswith("}") or kind not in ("env", "file") or not name:
        # A password may hold '${' by chance.
        told = written if _MEANT.fullmatch(written) else "'${'"
        raise InvalidSetting(
            key, f"{dotted(key)}: {told} is no reference; write ${{env:NAME}} or ${{file:/path}}, or $${{ for '${{'"
        )
    if kind == "env":
        if name not in env:
            raise InvalidSetting(key, f"{dotted(key)}: the environment variable {name} is not set; set it")
        return env[name]
    if not name.startswith("/"):
        raise InvalidSetting(key, f"{dotted(key)}: {written}: write the whole path of the file, starting with '/'")
    try:
        with Path(name).open("rb") as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise InvalidSetting(key, f"{dotted(key)}: {written}: the file is larger than {_MAX_FILE} bytes")
        return content.decode().rstrip("\r\n")
    except OSError as error:
        advice = "let this user read it" if isinstance(error, PermissionError) else "create it, or correct the path"
        raise InvalidSetting(key, f"{dotted(key)}: {written}: cannot be read: {error.strerror}; {advice}") from None
    except UnicodeDecodeError:
        raise InvalidSetting(key, f"{dotted(key)}: {written}: the file is not UTF-8 text") from None
