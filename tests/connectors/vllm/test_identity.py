"""Which KV a vLLM engine makes, by stand-ins for what vLLM says, whose classes have vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core.connectors.vllm import identity
from lmcache_core.connectors.vllm.plan import Facts
from lmcache_core.connectors.vllm.requests import Marks
from lmcache_core.errors import LayoutError
from lmcache_core.namespace import Encoding, GroupKind, Namespace

NATIVE = Encoding(layout="native", engine="vllm", backend="FLASH_ATTN", block_tokens=16, strides=(0, 32, 512, 2))


@dataclass(frozen=True)
class AttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: str = "torch.bfloat16"
    head_size_v: int | None = None
    sliding_window: int | None = None

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * 2


class FullAttentionSpec(AttentionSpec):
    pass


class SlidingWindowSpec(AttentionSpec):
    pass


class MLAAttentionSpec(AttentionSpec):
    pass


class MambaSpec(AttentionSpec):
    pass


class ChunkedLocalAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]


@dataclass
class Config:
    """What of vLLM's settings is read."""

    hf: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0, "num_hidden_layers": 2})
    dtype: str = "torch.bfloat16"
    cache_dtype: str = "auto"
    quantization: str | None = None
    longest: int = 4096
    ranks: int = 1
    load_format: str = "auto"
    model: str = "org/model"
    parallel: dict[str, int] = field(default_factory=dict)
    encoder_decoder: bool = False
    speculative: Any = None

    def vllm(self) -> Any:
        hf = SimpleNamespace(to_dict=lambda: dict(self.hf))
        return SimpleNamespace(
            model_config=SimpleNamespace(
                model=self.model,
                served_model_name=None,
                revision=None,
                hf_config=hf,
                hf_text_config=hf,
                dtype=self.dtype,
                quantization=self.quantization,
                max_model_len=self.longest,
                is_encoder_decoder=self.encoder_decoder,
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=self.ranks, **self.parallel),
            cache_config=SimpleNamespace(cache_dtype=self.cache_dtype),
            load_config=SimpleNamespace(load_format=self.load_format),
            speculative_config=self.speculative,
        )


def cache_config(*specs: Any, **more: Any) -> Any:
    groups = [
        SimpleNamespace(
            kv_cache_spec=spec, layer_names=[f"model.layers.{2 * number + n}.self_attn.attn" for n in (0, 1)]
        )
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, **more)


def describe(config: Config | None = None, *specs: Any, nbytes: int = 2048, **more: Any) -> Namespace:
    made = identity.group_specs(cache_config(*(specs or [FullAttentionSpec()])))
    facts = Facts(NATIVE, (nbytes,) * len(made))
    settings: dict[str, Any] = {"page_tokens": 64, "shards": 1, "weights": "weights"} | more
    return identity.describe_engine((config or Config()).vllm(), made, facts, **settings)


def test_a_full_group_is_what_the_spec_says() -> None:
    (group,) = describe().groups
    assert (group.kind, group.layers, group.page_layer_bytes) == (GroupKind.FULL, (0, 1), 4 * 2048)
    assert (group.kv_heads, group.head_size, group.planes, group.dtype) == (2, 8, 2, "bfloat16")
    assert group.window_tokens is None


def test_a_window_group_has_its_window_and_a_hybrid_model_both() -> None:
    namespace = describe(None, FullAttentionSpec(), SlidingWindowSpec(sliding_window=128))
    assert [(group.kind, group.window_tokens) for group in namespace.groups] == [
        (GroupKind.FULL, None),
        (GroupKind.WINDOW, 128),
    ]
    assert [group.layers for group in namespace.groups] == [(0, 1), (2, 3)]


def test_a_latent_is_one_plane_and_heads_of_k_and_v_may_differ() -> None:
    (latent,) = describe(None, MLAAttentionSpec(num_kv_heads=1, head_size=32)).groups
    assert (latent.kind, latent.planes, latent.head_size) == (GroupKind.FULL, 1, 32)
    (odd,) = describe(None, FullAttentionSpec(head_size=8, head_size_v=4)).groups
    assert (odd.planes, odd.head_size) == (1, 12)


def test_layers_of_one_kind_under_one_roof_are_one_group() -> None:
    roof = UniformTypeKVCacheSpecs(16, {"a": FullAttentionSpec(), "b": FullAttentionSpec()})
    assert len(describe(None, roof).groups) == 1
    for other in (SlidingWindowSpec(sliding_window=8), FullAttentionSpec(head_size=4)):
        with pytest.raises(LayoutError, match="cache group 0 has layers of several kinds"):
            describe(None, UniformTypeKVCacheSpecs(16, {"a": FullAttentionSpec(), "b": other}))


@pytest.mark.parametrize("spec", [MambaSpec(), ChunkedLocalAttentionSpec()])
def test_what_cannot_be_cached_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(LayoutError, match=f"cache group 1 is a {type(spec).__name__}, which is not supported yet"):
        identity.group_specs(cache_config(FullAttentionSpec(), spec))


def test_a_model_without_kv_or_whose_kv_stays_is_refused() -> None:
    with pytest.raises(LayoutError, match="no KV cache"):
        identity.group_specs(SimpleNamespace(kv_cache_groups=[]))
    config = cache_config(FullAttentionSpec())
    config.kv_cache_groups[0].enable_kv_transfer = False
    with pytest.raises(LayoutError, match="kept from being transferred"):
        identity.group_specs(config)


def test_a_page_has_whole_blocks_of_every_group() -> None:
    specs = identity.group_specs(
        cache_config(FullAttentionSpec(block_size=16), SlidingWindowSpec(block_size=48, sliding_window=96))
    )
    assert identity.block_tokens(specs) == 48
    assert specs[1].group(96, 100, "bfloat16").page_layer_bytes == 200


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism is not supported yet; set pipeline_parallel_size to 1"),
        ({"decode_context_parallel_size": 2}, "set decode_context_parallel_size to 1"),
        ({"prefill_context_parallel_size": 2}, "set prefill_context_parallel_size to 1"),
        ({"nnodes": 2}, "an engine over several hosts"),
    ],
)
def test_engines_that_cannot_use_the_cache_hear_why(parallel: dict[str, int], said: str) -> None:
    (reason,) = identity.refusals(Config(parallel=parallel).vllm())
    assert said in reason


def test_an_ordinary_engine_is_not_refused() -> None:
    assert list(identity.refusals(Config(ranks=4, parallel={"pipeline_parallel_size": 1}).vllm())) == []
    (reason,) = identity.refusals(Config(encoder_decoder=True).vllm())
    assert "encoder-decoder" in reason


@pytest.mark.parametrize(
    ("spec", "ranks", "replicas", "expected"),
    [
        (FullAttentionSpec(), 1, None, (1, 1)),
        (FullAttentionSpec(), 4, None, (4, 1)),
        (FullAttentionSpec(), 8, 4, (2, 4)),
        (MLAAttentionSpec(), 8, None, (1, 8)),
    ],
)
def test_ranks_that_hold_the_same_share_a_shard(
    spec: Any, ranks: int, replicas: int | None, expected: tuple[int, int]
) -> None:
    config = cache_config(spec, **({} if replicas is None else {"kv_tp_replicas": replicas}))
    assert identity.shards_of(Config(ranks=ranks).vllm(), config, identity.group_specs(config)) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("auto", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("fp8_ds_mla", "fp8_ds_mla"),
    ],
)
def test_the_logical_type_of_the_cache(written: str, expected: str) -> None:
    assert identity.kv_dtype(Config(cache_dtype=written).vllm()) == expected


def test_the_model_s_name_and_where_it_lies_are_nobody_s_business() -> None:
    first = describe(Config(model="/a", hf={"rope_theta": 1e4, "_name_or_path": "/a", "use_cache": True}))
    second = describe(Config(model="/b", hf={"use_cache": False, "_name_or_path": "/b", "rope_theta": 1e4}))
    assert (first.content, first.model_name, second.model_name) == (second.content, "/a", "/b")


@pytest.mark.parametrize(
    "changed",
    [
        Config(hf={"rope_theta": 5e5, "num_hidden_layers": 2}),
        Config(hf={"rope_theta": 1e4, "num_hidden_layers": 2, "rope_scaling": {"rope_type": "yarn", "factor": 4}}),
        Config(dtype="torch.float16"),
        Config(cache_dtype="fp8_e5m2"),
        Config(quantization="awq"),
        Config(speculative=SimpleNamespace(method="eagle", model="org/draft")),
    ],
)
def test_whatever_changes_numbers_makes_another_namespace(changed: Config) -> None:
    assert describe(changed, nbytes=4096).content != describe(nbytes=4096).content


@pytest.mark.parametrize(("kind", "same"), [("llama3", True), ("yarn", True), ("longrope", False), ("dynamic", False)])
def test_only_a_rope_that_moves_with_it_depends_on_the_longest_prompt(kind: str, same: bool) -> None:
    config = Config(hf={"rope_scaling": {"rope_type": kind, "factor": 4.0}})
    assert (describe(config).content == describe(replace(config, longest=8192)).content) is same


def test_weights_are_what_the_user_says_or_nobody_else_s_when_made_up(tmp_path: Any) -> None:
    assert identity.weights_of(Config().vllm(), "mine") == "id mine"
    made_up = {identity.weights_of(Config(load_format="dummy").vllm()) for _ in range(2)}
    assert len(made_up) == 2
    assert all(each.startswith("random ") for each in made_up)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert len(identity.weights_of(Config(model=str(tmp_path)).vllm())) == 64


def test_images_and_adapters_make_other_keys() -> None:
    feature = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=4, length=8))
    marks = identity.marks_of(SimpleNamespace(mm_features=[feature]), "lora 1234")
    assert marks == {"adapter": "lora 1234", "spans": ((4, 8, "cat"),)}
    assert identity.marks_of(SimpleNamespace(mm_features=None), None) == {"adapter": None, "spans": ()}
    seeds = {
        Marks(salt=salt, adapter=adapter).hasher(16).seed
        for salt in ((), ("a",), ("", "a"), ("a", "a"), ("b", "a"))
        for adapter in (None, "x", "")
    }
    assert len(seeds) == 15
    assert Marks(salt=("", "")).hasher(16).seed == b""


@pytest.mark.parametrize(
    ("groups", "replicas", "ahead", "expected"),
    [(1, 1, False, True), (2, 1, False, False), (1, 2, False, False), (1, 1, True, False)],
)
def test_a_step_loads_what_it_needs_only_where_nothing_goes_on_from_what_is_lost(
    groups: int, replicas: int, ahead: bool, expected: bool
) -> None:
    vllm = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
    assert identity.loads_within_a_step(vllm, groups, replicas) is expected
