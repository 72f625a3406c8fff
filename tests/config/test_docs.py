"""The page about configuration has every setting there is, and no other; its examples can be loaded."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from lmcache_core.config import (
    BreakerConfig,
    CipherConfig,
    Config,
    CpuConfig,
    Field,
    MetricsConfig,
    ShareConfig,
    TierConfig,
    fields_of,
    load_config,
)
from lmcache_core.plugins import load_backend

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

SECTIONS = {
    "Top level": Config,
    "`cpu`": CpuConfig,
    "`tiers`": TierConfig,
    "`breaker`": BreakerConfig,
    "`cipher`": CipherConfig,
    "`shares`": ShareConfig,
    "`metrics`": MetricsConfig,
}


def own_backends() -> list[str]:
    entries = importlib.metadata.entry_points(group="lmcache_core.backends")
    return sorted({entry.name for entry in entries if entry.dist and entry.dist.name == "lmcache-core"})


def sections() -> dict[str, str]:
    """Text of the page below each heading, and of the options of backends that have a page of their own."""
    found = sections_of(PAGE)
    for page in PAGE.parent.glob("backends/*.md"):
        found[f"`backend: {page.stem}`"] = sections_of(page).get("Options", "")
    return found


def sections_of(page: Path) -> dict[str, str]:
    parts = re.split(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def fields_by_section() -> dict[str, list[Field]]:
    found = {heading: list(fields_of(struct)) for heading, struct in SECTIONS.items()}
    found["`tiers`"] = [field for field in found["`tiers`"] if field.key != "options"]
    for name in own_backends():
        generic = {field.key for field in found["`tiers`"]} - {"capacity"}
        found[f"`backend: {name}`"] = [
            field for field in fields_of(load_backend(name).options_type) if field.key not in generic
        ]
    return found


def row(field: Field) -> str:
    """Start of the table row of a setting."""
    default = field.default if field.type != "mapping" and field.type != "list of mapping" else "see below"
    return f"| `{field.key}` | {field.type.replace(' | ', ', ')} | {default} |"


def test_the_built_in_backends_are_known() -> None:
    assert {"cpu", "disk"} <= set(own_backends())


@pytest.mark.parametrize("heading", [*SECTIONS, *[f"`backend: {name}`" for name in own_backends()]])
def test_every_setting_is_in_the_page(heading: str) -> None:
    text = sections().get(heading)
    assert text is not None, f"docs/configuration.md has no section {heading!r}"
    for field in fields_by_section()[heading]:
        wanted = row(field)
        assert wanted in text, f"docs/configuration.md needs in {heading!r} a row: {wanted} {field.description} |"


@pytest.mark.parametrize("heading", [*SECTIONS, *[f"`backend: {name}`" for name in own_backends()]])
def test_the_page_has_no_setting_that_is_gone(heading: str) -> None:
    keys = re.findall(r"^\| `([^`]+)` \|", sections()[heading], flags=re.MULTILINE)
    assert sorted(keys) == sorted(field.key for field in fields_by_section()[heading])


@pytest.mark.parametrize("heading", [*SECTIONS, *[f"`backend: {name}`" for name in own_backends()]])
def test_every_setting_has_a_description(heading: str) -> None:
    assert [field.key for field in fields_by_section()[heading] if not field.description] == []


def test_the_examples_can_be_loaded(work_directory: Path) -> None:
    secret = work_directory / "salt"
    secret.write_text("s")
    key = work_directory / "kv-key"
    key.write_text("MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\n")
    examples = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        text = example.replace("/run/secrets/salt", str(secret)).replace("/run/secrets/kv-key", str(key))
        loaded = load_config(text, env={"TENANT_SALT": "s"})
        assert isinstance(loaded.config, Config)
