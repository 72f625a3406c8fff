"""The page about vLLM names every option and metric, with its default, and none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from lmcache_core.config.fields import fields_of
from lmcache_core.connectors.vllm.counters import COUNTERS, metric_name
from lmcache_core.connectors.vllm.options import Options, RequestOptions, read_options, read_request_options

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\| (.+) \|$", PAGE, re.MULTILINE)


def test_every_option_is_in_the_page() -> None:
    named = [name for name, _, _ in ROWS]
    assert named == [field.key for struct in (Options, RequestOptions) for field in fields_of(struct)]


@pytest.mark.parametrize(("name", "default", "text"), ROWS, ids=[name for name, _, _ in ROWS])
def test_the_defaults_are_those_of_the_code(name: str, default: str, text: str) -> None:
    struct = Options if name in Options.__struct_fields__ else RequestOptions
    plain = getattr(struct(), name)
    if not default:
        assert plain in (None, "")
    elif struct is Options:
        written = float(default) if isinstance(plain, float) and default[-1].isdigit() else default
        assert getattr(read_options({name: {"true": True, "false": False}.get(default, written)}), name) == plain
    else:
        assert getattr(read_request_options({"lmcache_core": {name: {"true": True}[default]}}), name) == plain
    assert text.endswith(".")


def test_every_metric_is_in_the_page() -> None:
    named = re.findall(r"^\| `(vllm:lmcache_core_\w+_total(?:\{\w+\})?)` \|", PAGE, re.MULTILINE)
    labels = {name: f"{{{label}}}" if label else "" for name, (_, label) in COUNTERS.items()}
    expected = [f"{metric_name(name)}_total{label}" for name, label in labels.items()]
    assert named == expected


def test_every_option_has_a_description() -> None:
    for struct in (Options, RequestOptions):
        assert issubclass(struct, msgspec.Struct)
        assert all(field.description for field in fields_of(struct))
