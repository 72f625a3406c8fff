"""Whose KV it is: what must tell it from other KV does, and what changes between two starts does not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core.connectors.sglang.identity import (
    adapters_of,
    config_digest,
    describe_pool,
    describe_sidecar,
    flat_order,
    refusals,
    weights_of,
)
from lmcache_core.errors import LayoutError
from lmcache_core.namespace import Namespace


class MHATokenToKVPoolHost(SimpleNamespace):
    """As SGLang's, for keys and values of heads."""


class MLATokenToKVPoolHost(SimpleNamespace):
    """As SGLang's, for latents."""


class MambaPoolHost(SimpleNamespace):
    """One that is not known."""


def heads(**changes: Any) -> Any:
    fields = {
        "layout": "page_first",
        "page_size": 16,
        "page_num": 100,
        "dtype": "torch.bfloat16",
        "head_num": 2,
        "head_dim": 32,
        "v_head_dim": 32,
        "layer_num": 4,
        "target_layer_num": 4,
        "start_layer": 0,
        "storage_format_tag": None,
    }
    return MHATokenToKVPoolHost(**fields | changes)


def latents(**changes: Any) -> Any:
    fields = {
        "layout": "layer_first",
        "page_size": 16,
        "page_num": 100,
        "dtype": "torch.bfloat16",
        "kv_cache_dim": 576,
        "layer_num": 3,
        "target_layer_num": 3,
        "start_layer": 0,
        "storage_format_tag": None,
    }
    return MLATokenToKVPoolHost(**fields | changes)


def storage(**changes: Any) -> Any:
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "should_split_heads": False,
    }
    return SimpleNamespace(**fields | changes)


def describe(pool: Any = None, config: Any = None, **changes: Any) -> Namespace:
    pool = pool or heads()
    nbytes = 2 * 16 * 4 * 2 * 32 * 2 if isinstance(pool, MHATokenToKVPoolHost) else 16 * 3 * 576 * 2
    fields: dict[str, Any] = {"page_bytes": nbytes, "buffers": 2, "weights": "w", "config": "c", "model_name": "m"}
    return describe_pool(config or storage(), pool, **fields | changes)


def test_the_same_again_is_the_same() -> None:
    assert describe().space(0) == describe(heads(page_num=7), model_name="other").space(0)


@pytest.mark.parametrize(
    "other",
    [
        describe(heads(layout="page_head")),
        describe(heads(dtype="torch.float16")),
        describe(heads(dtype="torch.float8_e4m3fn")),
        describe(heads(head_num=4, head_dim=16, v_head_dim=16)),
        describe(heads(v_head_dim=16)),
        describe(heads(start_layer=4)),
        describe(heads(layout="layer_first"), buffers=8),
        describe(config=storage(tp_rank=1, tp_size=2)),
        describe(config=storage(tp_rank=0, tp_size=2)),
        describe(weights="other"),
        describe(config=storage(), **{"buffers": 1}),
        describe(latents()),
        describe().with_epoch(5),
    ],
)
def test_other_kv_is_other_kv(other: Namespace) -> None:
    assert other.space(0) != describe().space(0)


def test_ranks_share_latents() -> None:
    first = describe(latents(), storage(tp_rank=0, tp_size=4))
    assert first.space(0) == describe(latents(), storage(tp_rank=3, tp_size=4)).space(0)
    assert first.space(0) == describe(latents()).space(0)


@pytest.mark.parametrize(
    ("pool", "config", "text"),
    [
        (MambaPoolHost(), storage(), "MambaPoolHost"),
        (heads(layout="page_unified"), storage(), "page_unified"),
        (heads(), storage(pp_size=2), "pipeline"),
        (heads(), storage(attn_cp_size=2), "context parallelism"),
        (heads(), storage(dcp_size=2), "decode context"),
        (heads(), storage(should_split_heads=True), "tp_lcm_size"),
        (heads(layer_num=5), storage(), "draft"),
        (heads(storage_format_tag="x1"), storage(), "x1"),
    ],
)
def test_what_cannot_be_cached_is_refused_by_name(pool: Any, config: Any, text: str) -> None:
    assert any(text in reason for reason in refusals(config, pool))
    with pytest.raises(LayoutError, match=f"cannot be used with this engine.*{text}"):
        describe(pool, config)


def test_what_can_be_cached_is_not_refused() -> None:
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
        assert list(refusals(storage(tp_rank=1, tp_size=2), heads(layout=layout))) == []
    assert list(refusals(storage(), latents())) == []


def test_flat_copies_of_layers_have_keys_first() -> None:
    assert flat_order(heads(layout="layer_first", layer_num=3)) == [0, 3, 1, 4, 2, 5]
    for pool in (heads(), heads(layout="page_head"), latents()):
        assert flat_order(pool) is None


def test_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (tmp_path / name / "model.safetensors").write_bytes(b"1")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_bytes(b"2")
    a, b, c = (weights_of(SimpleNamespace(model_path=str(tmp_path / name))) for name in "abc")
    assert a == b != c
    dummy = SimpleNamespace(model_path=str(tmp_path / "a"), load_format="dummy")
    assert weights_of(dummy) != weights_of(dummy)
    assert weights_of(dummy, "mine") == weights_of(SimpleNamespace(model_path="gone"), "mine")
    with pytest.raises(LayoutError, match="weights_id"):
        weights_of(SimpleNamespace(model_path=str(tmp_path)))


def test_settings_that_change_numbers() -> None:
    plain = SimpleNamespace(dtype="auto", kv_cache_dtype="auto", quantization=None, port=1)
    same = SimpleNamespace(dtype="auto", kv_cache_dtype="auto", quantization=None, port=2)
    assert config_digest(plain) == config_digest(same)
    for name, value in (
        ("kv_cache_dtype", "fp8_e5m2"),
        ("quantization", "fp8"),
        ("json_model_override_args", '{"rope_theta": 5}'),
        ("context_length", 4096),
        ("modelopt_quant", "fp8"),
        ("quantize_and_serve", True),
        ("kt_method", "AMXINT8"),
        ("model_loader_extra_config", '{"a": 1}'),
    ):
        assert config_digest(SimpleNamespace(**vars(plain) | {name: value})) != config_digest(plain)


def test_the_order_in_which_a_set_or_a_mapping_is_written_does_not_count() -> None:
    """That of a set changes from process to process."""
    as_list = SimpleNamespace(lora_target_modules=["a", "b", "c"], modelopt_quant={"x": 1, "y": 2})
    as_set = SimpleNamespace(lora_target_modules={"c", "b", "a"}, modelopt_quant={"y": 2, "x": 1})
    assert config_digest(as_list) == config_digest(as_set)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"load_format": "remote_instance"}, "--load-format remote_instance"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode client"),
        ({"kt_weight_path": "/kt"}, "--kt-weight-path /kt"),
        ({"modelopt_checkpoint_restore_path": "/m"}, "--modelopt-checkpoint-restore-path /m"),
        ({"model_loader_extra_config": '{"qlora_adapter_name_or_path": "/q"}'}, "qlora_adapter_name_or_path"),
    ],
)
def test_weights_that_are_not_the_checkpoint_s_are_nobody_else_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], named: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    plain = SimpleNamespace(model_path=str(tmp_path), load_format="auto", model_loader_extra_config="{}")
    there = SimpleNamespace(**vars(plain) | changed)
    assert weights_of(plain) == weights_of(plain)
    assert caplog.records == []
    assert weights_of(there, own=lambda: "mine") == "mine"
    (record,) = caplog.records
    assert named in record.message
    assert "weights_id" in record.message
    assert weights_of(there, "told") == "id told"


def test_a_model_in_a_folder_of_downloads(tmp_path: Path) -> None:
    """As `--download-dir` says, and nowhere else."""
    place = tmp_path / "models--some--model"
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc" / "model.safetensors").write_bytes(b"1")
    there = SimpleNamespace(model_path="some/model", download_dir=str(tmp_path))
    assert weights_of(there) == weights_of(SimpleNamespace(model_path=str(place / "snapshots" / "abc")))
    with pytest.raises(LayoutError, match="name the weights with weights_id"):
        weights_of(SimpleNamespace(model_path="some/model", download_dir=str(tmp_path / "other")))


def test_an_adapter_is_known_by_its_content_and_not_by_its_name_alone(tmp_path: Path) -> None:
    """However SGLang's arguments name it."""
    place = tmp_path / "adapter"
    place.mkdir()

    def written(content: bytes) -> str:
        (place / "adapter_model.safetensors").write_bytes(content)
        return config_digest(SimpleNamespace(lora_paths=[f"a={place}"]))

    one = written(b"1" * 100)
    assert one != config_digest(SimpleNamespace(lora_paths=None))
    for same in (
        {"a": str(place)},
        [{"lora_name": "a", "lora_path": str(place)}],
        [SimpleNamespace(lora_name="a", lora_path=str(place))],
    ):
        assert config_digest(SimpleNamespace(lora_paths=same)) == one
    assert config_digest(SimpleNamespace(lora_paths=[f"b={place}"])) != one
    assert list(adapters_of(SimpleNamespace(lora_paths=[str(place)]))) == [str(place)]
    assert written(b"2" * 100) != one
    with pytest.raises(LayoutError):
        config_digest(SimpleNamespace(lora_paths=["a=/gone"]))


class MambaHost(SimpleNamespace):
    """Recurrent state."""


MambaHost.__name__ = "MambaPoolHost"


def sidecar(pool: Any, name: str, config: Any = None, kv: Namespace | None = None) -> Namespace:
    return describe_sidecar(config or storage(is_mla_model=False), pool, name, sizes=[64, 32], kv=kv or describe())


def test_pools_besides_the_kv_are_their_own_and_their_ranks() -> None:
    window = heads(layer_num=2, target_layer_num=2)
    state = MambaHost(dtype="torch.bfloat16", temporal_dtype="torch.float32", layout="page_first")
    plain = sidecar(window, "swa")
    assert plain.space(0) == sidecar(heads(layer_num=2, target_layer_num=2, page_num=9), "swa").space(0)
    others = [
        describe(),
        sidecar(state, "mamba"),
        sidecar(window, "swa", storage(is_mla_model=False, tp_rank=1, tp_size=2)),
        sidecar(heads(layer_num=2, target_layer_num=2, layout="page_head"), "swa"),
        sidecar(window, "swa", kv=describe(weights="other")),
        sidecar(window, "swa", kv=describe(heads(start_layer=4))),
    ]
    assert len({other.space(0) for other in [plain, *others]}) == 1 + len(others)


def test_ranks_share_pools_of_latents_but_for_states() -> None:
    window = heads(layer_num=2, target_layer_num=2)
    state = MambaHost(dtype="torch.bfloat16", temporal_dtype="torch.float32", layout="page_first")
    ranks = [storage(is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert len({sidecar(window, "swa", rank).space(0) for rank in ranks}) == 1
    assert len({sidecar(state, "mamba", rank).space(0) for rank in ranks}) == 2


@pytest.mark.parametrize(
    ("pool", "name", "text"),
    [
        (heads(), "draft", "'draft'"),
        (latents(), "swa", "MLATokenToKVPoolHost"),
        (heads(layer_num=5), "swa", "draft"),
        (MambaHost(dtype="x", mtp_draft_buffer_infos=(1,)), "mamba", "draft"),
    ],
)
def test_other_pools_are_refused_by_name(pool: Any, name: str, text: str) -> None:
    with pytest.raises(LayoutError, match=f"cannot be used with this engine.*{text}"):
        sidecar(pool, name)
