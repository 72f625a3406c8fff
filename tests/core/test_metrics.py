"""Metrics: what is scraped equals what happened, counted by the test itself."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from lmcache_backends.disk.inspection import inspect_path
from lmcache_core import Cache, ConfigError, metrics
from lmcache_core.client import Client, OwnerStats, Stats
from lmcache_core.config import Config, MetricsConfig
from lmcache_core.counts import COUNTERS
from lmcache_core.direct import DirectClient
from lmcache_core.index.decisions import Refusal
from lmcache_core.metrics import GAUGES, TIER_GAUGES, MetricsServer, NodeCollector, serve_metrics
from tests.cli.kv import CHUNK_TOKENS, FRAME_BYTES, PAGE_BYTES, PAGE_TOKENS, View, make_namespace, prompt_of, settings

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
POOL_CHUNKS = 8

Samples = dict[tuple[str, str], float]


def get(url: str, accept: str = "") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        body: bytes = answer.read()
    return body.decode()


def scrape(server: MetricsServer) -> Samples:
    """All samples by name without the prefix, and the values of the labels."""
    return {
        (sample.name.removeprefix("lmcache_core_"), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(get(server.url))
        for sample in family.samples
    }


def counted(samples: Samples) -> Samples:
    """Counters of the node that are not 0, without times, which no test knows."""
    return {
        (name, label): value
        for (name, label), value in samples.items()
        if name.endswith("_total") and value and "_seconds_" not in name and not name.startswith("backend_events")
    }


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    config = settings(tmp_path / "disk", cpu=POOL_CHUNKS * FRAME_BYTES)
    with Cache.open(config, make_namespace()) as cache:
        yield cache


@pytest.fixture
def server(cache: Cache) -> Iterator[MetricsServer]:
    with MetricsServer(cache.client) as server:
        yield server


class Accountant:
    """Works with a cache and counts, from what it asked for and what a chunk's size is, what must have happened."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.counts: Counter[tuple[str, str]] = Counter()
        self.pool: dict[tuple[int, int], None] = {}
        """Chunks in the pool by prompt and number, the next to be evicted first."""
        self.disk: set[tuple[int, int]] = set()
        self.looked: Counter[int] = Counter()
        """How often each prompt was looked up without being retrieved since."""

    def count(self, name: str, label: str, number: int) -> None:
        self.counts[f"{name}_total", label] += number

    def store(self, number: int, chunks: int) -> None:
        """Store a prompt of which nothing is there."""
        tokens = prompt_of(number, chunks)
        result = self.cache.store(tokens, View(len(tokens), seed=number))
        assert (result.stored, result.present, result.dropped) == (len(tokens), 0, 0)
        assert result.wait(10)
        self.count("stored_tokens", "store", len(tokens))
        self.count("copied_bytes", "from_engine", len(tokens) // PAGE_TOKENS * PAGE_BYTES)
        self.count("written_chunks", "disk", chunks)
        self.count("written_bytes", "disk", chunks * FRAME_BYTES)
        self.enter(number, range(chunks))
        self.disk |= {(number, chunk) for chunk in range(chunks)}

    def store_again(self, number: int, chunks: int) -> None:
        tokens = prompt_of(number, chunks)
        result = self.cache.store(tokens, View(len(tokens), seed=number))
        assert (result.stored, result.present, result.dropped) == (0, len(tokens), 0)
        assert result.wait(10)
        self.count("present_tokens", "store", len(tokens))
        self.touch(number, chunks)

    def store_without_room(self, number: int) -> None:
        """Store one chunk that the pool has no room for."""
        tokens = prompt_of(number, 1)
        result = self.cache.store(tokens, View(len(tokens), seed=number))
        assert (result.stored, result.present, result.dropped) == (0, 0, len(tokens))
        self.count("dropped_chunks", "pool_full", 1)

    def lookup(self, number: int, chunks: int, hits: dict[str, int]) -> None:
        """`hits` are chunks by tier."""
        tokens = prompt_of(number, chunks, more=3)
        found = self.cache.lookup(tokens)
        assert found.tiers == {tier: each * CHUNK_TOKENS for tier, each in hits.items()}
        self.count("lookups", "lookup", 1)
        self.count("lookup_tokens", "lookup", chunks * CHUNK_TOKENS)
        for tier, each in hits.items():
            self.count("hit_tokens", tier, each * CHUNK_TOKENS)
        self.looked[number] += 1

    def retrieve(self, number: int, chunks: int, expected: int | None = None) -> None:
        """`expected` are the chunks that come back; all by default."""
        expected = chunks if expected is None else expected
        tokens = prompt_of(number, chunks)
        view, wanted = View(len(tokens)), View(len(tokens), seed=number)
        if self.looked[number]:
            self.looked[number] -= 1
        else:
            promised = [chunk for chunk in range(chunks) if {(number, chunk)} & (self.pool.keys() | self.disk)]
            in_pool = sum((number, chunk) in self.pool for chunk in promised)
            self.count("lookups", "retrieve", 1)
            self.count("lookup_tokens", "retrieve", chunks * CHUNK_TOKENS)
            self.count("hit_tokens", "cpu", in_pool * CHUNK_TOKENS)
            self.count("hit_tokens", "disk", (len(promised) - in_pool) * CHUNK_TOKENS)
        found = self.cache.retrieve(tokens, view)
        assert found.tokens == expected * CHUNK_TOKENS
        pages = found.tokens // PAGE_TOKENS
        assert (view.kv[:pages] == wanted.kv[:pages]).all()
        from_disk = [chunk for chunk in range(expected) if (number, chunk) not in self.pool]
        self.count("retrieved_tokens", "cpu", (expected - len(from_disk)) * CHUNK_TOKENS)
        self.count("retrieved_tokens", "disk", len(from_disk) * CHUNK_TOKENS)
        self.count("copied_bytes", "to_engine", pages * PAGE_BYTES)
        self.read(number, from_disk)

    def read(self, number: int, chunks: Sequence[int]) -> None:
        """Chunks were read from disk."""
        self.count("read_chunks", "disk", len(chunks))
        self.count("read_bytes", "disk", len(chunks) * FRAME_BYTES)
        self.enter(number, chunks)

    def enter(self, number: int, chunks: Sequence[int]) -> None:
        """Chunks came into the pool, in place of as many as it has no room for."""
        evicted = max(0, len(self.pool) + len(chunks) - POOL_CHUNKS)
        self.count("evicted_chunks", "cpu", evicted)
        for chunk in list(self.pool)[:evicted]:
            del self.pool[chunk]
        self.touch(number, len(chunks), chunks)

    def touch(self, number: int, chunks: int, which: Sequence[int] | None = None) -> None:
        """Tails go first, so that the head is used last."""
        for chunk in reversed(range(chunks) if which is None else which):
            self.pool.pop((number, chunk), None)
            self.pool[number, chunk] = None

    def truth(self) -> Samples:
        return {key: float(value) for key, value in self.counts.items() if value}

    def check(self, server: MetricsServer) -> None:
        """Everything scraped is what was counted here."""
        assert self.cache.flush(10)
        samples = scrape(server)
        assert counted(samples) == self.truth()
        gauges = {
            ("pool_capacity_bytes", ""): POOL_CHUNKS * FRAME_BYTES,
            ("pool_usable_bytes", ""): POOL_CHUNKS * FRAME_BYTES,
            ("pool_used_bytes", ""): len(self.pool) * FRAME_BYTES,
            ("pool_slots", ""): len(self.pool),
            ("pool_chunks", ""): len(self.pool),
            ("leases", ""): 0,
            ("staged_chunks", ""): 0,
            ("tier_up", "disk"): 1,
            ("tier_used_bytes", "disk"): len(self.disk) * FRAME_BYTES,
            ("tier_chunks", "disk"): len(self.disk),
            ("tier_queued_operations", "disk"): 0,
            ("tier_quarantined_bytes", "disk"): 0,
        }
        assert {key: samples[key] for key in gauges} == gauges
        assert [key for key, value in samples.items() if value < 0] == []


def damage(path: Path, tokens: list[int], cache: Cache) -> None:
    """Flip a bit of the payload of a prompt's last chunk, which is not in the pool."""
    page = cache.prompt(tokens).keys[-1]
    (entry,) = [entry for entry in inspect_path(path).entries() if entry.stored.key.page == page]
    with entry.file.open("r+b") as file:
        file.seek(entry.offset + 4096 + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_what_is_scraped_is_what_happened(cache: Cache, server: MetricsServer, tmp_path: Path) -> None:
    account = Accountant(cache)
    account.check(server)

    account.lookup(1, 3, {})
    account.store(1, 3)
    account.lookup(1, 3, {"cpu": 3})
    account.check(server)

    account.retrieve(1, 3)
    account.store_again(1, 3)
    account.store(2, 4)
    account.check(server)

    account.store(3, 4)  # the pool has room for one more: all of 1 goes, the least recently used
    account.lookup(1, 3, {"disk": 3})
    account.lookup(2, 4, {"cpu": 4})
    account.check(server)

    account.retrieve(1, 3)  # from disk, in place of the tail of 2
    account.lookup(2, 4, {"cpu": 1, "disk": 3})
    account.check(server)

    cache.evict(prompt_of(1, 3), ["cpu"])
    for chunk in range(3):
        del account.pool[1, chunk]
    damage(tmp_path / "disk", prompt_of(1, 3), cache)
    account.retrieve(1, 3, expected=2)
    account.count("corrupt_chunks", "disk", 1)
    account.disk.discard((1, 2))
    account.check(server)

    account.lookup(1, 3, {"cpu": 2})
    assert [cache.evict(prompt_of(number, 4), ["cpu"]) for number in (2, 3)] == [1, 4]
    account.pool = {key: None for key in account.pool if key[0] == 1}
    account.store(4, 3)
    account.store(6, 3)
    assert [cache.pin(prompt_of(number, chunks)) for number, chunks in ((1, 2), (4, 3), (6, 3))] == [32, 48, 48]
    account.store_without_room(5)
    assert scrape(server)["pinned_chunks", ""] == POOL_CHUNKS
    account.check(server)

    assert cache.clear() == len(account.pool.keys() | account.disk)
    account.pool.clear()
    account.disk.clear()
    account.check(server)
    assert scrape(server)["pinned_chunks", ""] == 0
    account.lookup(4, 3, {})
    account.check(server)

    samples = scrape(server)
    for name, label in (("copy", "from_engine"), ("copy", "to_engine"), ("read", "disk"), ("write", "disk")):
        assert 0 < samples[f"{name}_seconds_total", label] < 60
    assert samples["backend_events_total", "segments_taken,disk"] >= 1


def test_every_series_of_this_workload_was_there_from_the_start(cache: Cache, server: MetricsServer) -> None:
    before = scrape(server)
    for number in (1, 2, 3):
        tokens = prompt_of(number, 4)
        assert cache.store(tokens, View(len(tokens), seed=1)).wait(10)
        cache.lookup(tokens)
    assert cache.retrieve(prompt_of(1, 4), View(4 * CHUNK_TOKENS)).tiers == {"disk": 4 * CHUNK_TOKENS}
    assert scrape(server).keys() == before.keys()
    assert {value for (name, _), value in before.items() if name in {f"{each}_total" for each in COUNTERS}} == {0.0}


def test_a_tier_that_is_down_is_seen(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.symlink_to(blocked)  # cannot be opened now; somebody may mend it
    with Cache.open(settings(blocked), make_namespace()) as cache, MetricsServer(cache.client) as server:
        samples = scrape(server)
        assert samples["tier_up", "blocked"] == 0
        assert samples["opened_breakers_total", "blocked"] == 1
        assert samples["tier_capacity_bytes", "blocked"] == 64 << 20


def test_two_nodes_of_one_process_are_served_side_by_side(tmp_path: Path) -> None:
    before = {metric.name for metric in REGISTRY.collect()}
    with (
        Cache.open(settings(tmp_path / "a"), make_namespace()) as first,
        Cache.open(settings(tmp_path / "b"), make_namespace()) as second,
        MetricsServer(first.client) as one,
        MetricsServer(second.client) as other,
    ):
        assert one.port != other.port
        tokens = prompt_of(1, 2)
        first.store(tokens, View(len(tokens), seed=1)).wait(10)
        assert scrape(one)["stored_tokens_total", "store"] == 32
        assert scrape(other)["stored_tokens_total", "store"] == 0
        assert scrape(one)["written_chunks_total", "a"] == 2
    assert {metric.name for metric in REGISTRY.collect()} == before, "nothing may go to the engine's own registry"


def test_openmetrics_is_spoken_too(server: MetricsServer) -> None:
    text = get(server.url, accept="application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    families = {family.name: family.type for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert families["lmcache_core_lookups"] == "counter"
    assert families["lmcache_core_pool_used_bytes"] == "gauge"


def test_some_metrics_can_be_asked_for_by_name(server: MetricsServer) -> None:
    families = list(text_string_to_metric_families(get(f"{server.url}?name[]=lmcache_core_leases")))
    assert [family.name for family in families] == ["lmcache_core_leases"]


@pytest.mark.parametrize(("path", "method", "status"), [("/secrets", "GET", 404), ("/metrics", "POST", 405)])
def test_nothing_else_is_served(server: MetricsServer, path: str, method: str, status: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    with refused.value as answer:
        assert answer.status == status


def test_a_closed_node_is_unavailable_and_not_empty(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache = Cache.open(settings(tmp_path / "disk"), make_namespace())
    with MetricsServer(cache.client) as server:
        cache.close()
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server.url)
        with refused.value as answer:
            assert (answer.status, answer.read()) == (503, b"the node has been closed\n")
    assert capfd.readouterr() == ("", "")


def test_a_closed_server_lets_go_of_its_port(cache: Cache) -> None:
    server = MetricsServer(cache.client)
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(server.url)
    with MetricsServer(cache.client, port=server.port) as again:
        assert again.port == server.port
        assert scrape(again)["tier_up", "disk"] == 1


def test_a_reader_that_stalls_holds_up_neither_others_nor_the_close(server: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stalled:
        stalled.sendall(b"GET /metr")
        assert scrape(server)["tier_up", "disk"] == 1
        server.close()


def test_a_port_in_use_is_an_error_that_names_the_setting(cache: Cache, server: MetricsServer) -> None:
    with pytest.raises(
        ConfigError, match=rf"metrics\.port: cannot listen on 127\.0\.0\.1, port {server.port}: Address"
    ):
        MetricsServer(cache.client, port=server.port)


def test_an_address_of_another_host_is_an_error_that_names_the_setting(cache: Cache) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.(host|port): .*192\.0\.2\.7"):
        MetricsServer(cache.client, host="192.0.2.7")
    with pytest.raises(ConfigError, match=r"metrics\.host: 'not a host' is no address of this host"):
        MetricsServer(cache.client, host="not a host")


def test_ipv6_is_listened_on(cache: Cache) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("IPv6 is missing: this machine has no ::1")
    with MetricsServer(cache.client, host="::1") as server:
        assert server.url == f"http://[::1]:{server.port}/metrics"
        assert scrape(server)["tier_up", "disk"] == 1


def test_metrics_are_off_unless_the_configuration_says_otherwise(cache: Cache) -> None:
    assert serve_metrics(cache.client, Config()) is None
    server = serve_metrics(cache.client, Config(metrics=MetricsConfig(enabled=True, port=0)))
    assert server is not None
    with server:
        assert server.host == "127.0.0.1"
        assert server.port > 1023
        assert scrape(server)["tier_up", "disk"] == 1


def test_counting_costs_nothing_until_somebody_asks(cache: Cache) -> None:
    calls = 0
    stats = cache.client.stats

    def asked() -> object:
        nonlocal calls
        calls += 1
        return stats()

    client: Client = type("Asked", (), {"stats": staticmethod(asked)})()
    with MetricsServer(client) as server:
        assert calls == 0
        scrape(server)
        assert calls == 1


def test_the_core_does_not_import_prometheus_by_itself() -> None:
    code = "import sys, lmcache_core.cache, lmcache_core.direct; print('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_what_models_and_tenants_hold_is_told_by_tier(cache: Cache, server: MetricsServer) -> None:
    name = cache.namespace.model_name or cache.namespace.content.hex()[:16]
    assert scrape(server)["owner_bytes", f"model,{name},cpu"] == 0
    tokens = prompt_of(1, 3)
    assert cache.store(tokens, View(len(tokens), seed=1)).wait(10)
    node = cache.client.node  # type: ignore[attr-defined]
    tenant = Cache(DirectClient(node, tenant='t "1"'), make_namespace())
    tokens = prompt_of(2, 2)
    assert tenant.store(tokens, View(len(tokens), seed=2)).wait(10)
    cache.evict(prompt_of(1, 3), ["cpu"])
    told = {labels: value for (name, labels), value in scrape(server).items() if name == "owner_bytes"}
    assert told == {
        f"model,{name},cpu": 0,
        f"model,{name},disk": 3 * FRAME_BYTES,
        'tenant,t "1",cpu': 2 * FRAME_BYTES,
        'tenant,t "1",disk': 2 * FRAME_BYTES,
    }


def test_owners_beyond_the_largest_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_OWNERS", 2)
    held = {"a": (5, 0), "b": (1, 70), "c": (3, 6), "d": (2, 2), "other": (8, 80)}
    owners = [OwnerStats("tenant", name, {"cpu": cpu, "disk": disk}) for name, (cpu, disk) in held.items()]
    stats = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0.0, (), {}, owners=owners)
    (family,) = [each for each in NodeCollector(lambda: stats).collect() if each.name == "lmcache_core_owner_bytes"]
    assert {tuple(sample.labels.values()): sample.value for sample in family.samples} == {
        ("tenant", "other", "cpu"): 8,
        ("tenant", "other", "disk"): 80,
        ("tenant", "b", "cpu"): 1,
        ("tenant", "b", "disk"): 70,
        ("other", "other", "cpu"): 5 + 3 + 2,
        ("other", "other", "disk"): 0 + 6 + 2,
    }


def test_a_thousand_owners_are_no_more_series() -> None:
    owners = [OwnerStats("tenant", f"t{number}", {"cpu": number}) for number in range(1000)]
    stats = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0.0, (), {}, owners=owners)
    (family,) = [each for each in NodeCollector(lambda: stats).collect() if each.name == "lmcache_core_owner_bytes"]
    assert len(family.samples) == metrics.MOST_OWNERS + 1
    assert sum(sample.value for sample in family.samples) == sum(range(1000))


# Names


def exported() -> list[str]:
    counters = [f"lmcache_core_{name}_total" for name in COUNTERS]
    gauges = [f"lmcache_core_{name}" for name in [*GAUGES, *TIER_GAUGES]]
    others = ["lmcache_core_owner_bytes", "lmcache_core_backend_events_total", "lmcache_core_build_info"]
    return [*counters, *gauges, *others]


def test_no_metric_is_exported_that_these_tests_do_not_know(server: MetricsServer) -> None:
    families = text_string_to_metric_families(get(server.url))
    names = [f"{family.name}_total" if family.type == "counter" else family.name for family in families]
    assert sorted(names) == sorted(exported())


def test_names_say_their_unit_and_nothing_can_be_computed_from_others() -> None:
    assert [name for name in exported() if re.search(r"_(ratio|rate|percent|average|ms)(_|$)", name)] == []
    assert [name for name in exported() if not re.fullmatch(r"lmcache_core_[a-z_]+", name)] == []


def rows() -> dict[str, tuple[str, str]]:
    """Label and meaning by name, as the page has them."""
    found = re.findall(r"^\| `(lmcache_core_\w+)` \|([^|]*)\| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return {name: (label.strip(), text) for name, label, text in found}


@pytest.mark.parametrize("name", sorted(exported()))
def test_every_metric_is_in_the_page(name: str, server: MetricsServer) -> None:
    families = {family.name: family for family in text_string_to_metric_families(get(server.url))}
    family = families[name.removesuffix("_total")]
    wanted = family.documentation
    assert name in rows(), f"docs/metrics.md needs a row for {name}: {wanted}"
    labels = {label for sample in family.samples for label in sample.labels} or label_of(name)
    found, text = rows()[name]
    assert set(re.findall(r"`(\w+)`", found)) == labels
    assert text == wanted


def label_of(name: str) -> set[str]:
    """Of a metric without a series yet."""
    if name.removeprefix("lmcache_core_") in TIER_GAUGES:
        return {"tier"}
    counter = COUNTERS.get(name.removeprefix("lmcache_core_").removesuffix("_total"))
    return {counter.label} if counter else set()


def test_the_page_has_no_metric_that_is_gone() -> None:
    assert sorted(rows()) == sorted(exported())


def test_queries_in_the_page_use_metrics_that_exist() -> None:
    used = set(re.findall(r"lmcache_core_\w+", PAGE.read_text()))
    assert used - set(exported()) == set()


def names_counted() -> Iterator[tuple[str, str]]:
    root = Path(__file__).parents[2]
    for package in ("lmcache_core", "backends", "transfer"):
        for file in (root / package).rglob("*.py"):
            for name in re.findall(r"(?:counts\.add|client\.count)\(\s*\"([a-z_]+)\"", file.read_text()):
                yield name, str(file)


def test_what_is_counted_anywhere_is_a_counter_that_is_exported() -> None:
    found = list(names_counted())
    assert len(found) > 20
    assert [(name, file) for name, file in found if name not in COUNTERS] == []


def test_reasons_and_events_are_explained(cache: Cache) -> None:
    cells = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \| ", PAGE.read_text(), flags=re.MULTILINE)
    explained = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    (tier,) = cache.stats().tiers
    assert [name for name in [*tier.counters, *(reason.value for reason in Refusal)] if name not in explained] == []
