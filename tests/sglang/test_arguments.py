"""Every server argument of this version of SGLang is one that tells KV apart, or known not to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from lmcache_core.connectors.sglang.arguments import ADDED, ELSEWHERE, FILES, NUMBERS, changed
from lmcache_core.connectors.sglang.identity import config_digest
from lmcache_core.connectors.sglang.sharing import APART, FORMATS
from lmcache_core.errors import LayoutError

OTHERWISE = {
    "model_path": "the digest of the checkpoint's files",
    "revision": "the same",
    "download_dir": "where those are",
    "weight_cache_mode": "weights that come from elsewhere",
    "lora_paths": "the digests of the adapters' files",
    "page_size": "a field of the namespace",
    "tp_size": "a field of the namespace, by the rank",
    "custom_weight_loader": "called for weights that change in place, after which nothing old is found",
    "weight_version": "the same",
    "uno_lora_path": "of drafts; pools of draft models are refused",
}
"""Arguments that count, or what they do does, by something else than their value."""
NONE_OF_IT = (Path(__file__).parent / "arguments_that_do_not_count.txt").read_text().split()
"""Arguments by which numbers of the KV mean what they mean without: how it is computed, when, where and for whom, what
becomes of it, and draft models, whose pools are refused."""


def test_every_argument_is_known_to_count_or_not_to() -> None:
    """If this fails for a new version of SGLang: decide for each new name whether KV means something else with it."""
    known = [*NUMBERS, *FILES, *OTHERWISE, *NONE_OF_IT]
    assert len(known) == len(set(known))
    there = set(ServerArgs.__struct_fields__)
    assert sorted(there - set(known)) == []
    assert sorted(set(known) - there) == []
    assert {*ELSEWHERE, *ADDED} <= set(known)


def test_an_engine_as_it_comes_shares_what_it_computes() -> None:
    assert list(changed(ServerArgs(model_path="m"), APART)) == []
    assert ServerArgs(model_path="m").load_format in FORMATS


def test_the_digest_is_the_same_for_the_same_arguments() -> None:
    one = ServerArgs(model_path="m", port=1, lora_target_modules={"q_proj", "k_proj", "v_proj"})
    same = ServerArgs(model_path="n", port=2, lora_target_modules=["k_proj", "q_proj", "v_proj"])
    assert config_digest(one) == config_digest(same) != config_digest(ServerArgs(model_path="m"))


VALUES: dict[str, Any] = {"kt_num_gpu_experts": 3, "forward_hooks": [{"name": "h"}], "modelopt_quant": {"a": 1, "b": 2}}


@pytest.mark.parametrize("name", NUMBERS)
def test_each_of_them_tells_kv_apart(name: str) -> None:
    plain = ServerArgs(model_path="m")
    default = getattr(plain, name)
    value = VALUES.get(name, not default if isinstance(default, bool) else "something")
    assert config_digest(ServerArgs(model_path="m", **{name: value})) != config_digest(plain)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_named_counts_by_what_is_in_it(name: str, tmp_path: Path) -> None:
    found = []
    for folder, content in (("a", {"x": 1}), ("b", {"x": 1}), ("c", {"x": 2})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text(json.dumps(content))
        found.append(config_digest(ServerArgs(model_path="m", **{name: str(tmp_path / folder / "file")})))
    assert found[0] == found[1] != found[2]
    assert found[0] != config_digest(ServerArgs(model_path="m"))
    with pytest.raises(LayoutError, match=f"--{name.replace('_', '-')}: .*gone cannot be read.*No such file"):
        config_digest(ServerArgs(model_path="m", **{name: str(tmp_path / "gone")}))
