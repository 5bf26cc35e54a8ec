"""Looking at live buckets: page by page, by policy and by text, past what is not ours."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.bucket.bucket import Record
from limiter.store import inspect, keys, layout
from limiter.store.inspect import BucketPage, CursorError, PageQuery, list_buckets
from limiter.store.keys import Slot, bucket_name
from limiter.store.link.connect import Link, open_link
from tests.support.operations import START_US, ask, work_terms
from tests.support.servers import Cluster, Server
from tests.support.stores import ScriptStore

TERMS = work_terms()


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    link = await open_link(server.url)
    yield link
    await link.aclose()


def fill(server: Server | Cluster, policy: str, count: int, slot: Slot | None = None) -> set[str]:
    """Buckets of one policy, as requests leave them."""
    names = [bucket_name(policy, [f"customer {number}"]) for number in range(count)]
    for at in range(0, count, 100):
        use(server, names[at : at + 100], slot)
    return set(names)


def use(server: Server | Cluster, names: list[str], slot: Slot | None = None) -> None:
    store = ScriptStore(server, slot)
    store.acquire([ask(TERMS, bucket=name) for name in names], START_US, flush_id=names[0].encode())


async def all_pages(link: Link, query: PageQuery = PageQuery()) -> list[BucketPage]:  # noqa: B008  a value
    pages = [await list_buckets(link, query)]
    while pages[-1].cursor:
        pages.append(await list_buckets(link, query._replace(cursor=pages[-1].cursor)))
    return pages


def names_in(pages: list[BucketPage]) -> list[str]:
    return [name for page in pages for name, _ in page.buckets]


async def test_an_empty_slot_has_no_buckets(link: Link) -> None:
    assert await list_buckets(link, PageQuery()) == BucketPage([], "", [])


async def test_a_bucket_is_shown_with_its_record(link: Link, server: Server) -> None:
    fill(server, "reads", 1)
    ((name, record),) = (await list_buckets(link, PageQuery())).buckets
    assert name == "reads:customer%200"
    assert isinstance(record, Record)
    assert (record.balance, record.capacity, record.rate, record.requests, record.admitted) == (48, 50, 100, 1, 1)


@pytest.mark.parametrize("limit", [1, 7, 100, 5000])
async def test_pages_show_every_bucket_once_and_keep_to_their_limit(link: Link, server: Server, limit: int) -> None:
    expected = fill(server, "reads", 60 if limit == 1 else 700)
    pages = await all_pages(link, PageQuery(limit=limit))
    assert sorted(names_in(pages)) == sorted(expected)
    assert all(len(page.buckets) <= limit for page in pages)


async def test_only_the_buckets_of_the_slot_are_shown(link: Link, server: Server) -> None:
    expected = fill(server, "reads", 3)
    fill(server, "reads", 5, Slot("other"))
    fill(server, "reads", 5, Slot("default", 1))
    server.command("SET", keys.idempotency(Slot().prefix, "key"), "not a bucket")
    assert set(names_in(await all_pages(link))) == expected
    assert len((await list_buckets(link, PageQuery(partition=1))).buckets) == 5
    assert len((await list_buckets(link, PageQuery("other"))).buckets) == 5


async def test_buckets_are_filtered_by_policy_and_by_text(link: Link, server: Server) -> None:
    reads = fill(server, "reads", 12)
    fill(server, "reads-eu", 3)
    whole = bucket_name("reads", [])
    use(server, [whole])
    assert set(names_in(await all_pages(link, PageQuery(policy="reads")))) == reads | {whole}
    assert names_in(await all_pages(link, PageQuery(policy="reads*"))) == []
    assert sorted(names_in(await all_pages(link, PageQuery(contains="%201")))) == sorted(
        ["reads:customer%201", "reads:customer%2010", "reads:customer%2011", "reads-eu:customer%201"]
    )
    assert names_in(await all_pages(link, PageQuery(policy="reads-eu", contains="%201", limit=1))) == [
        "reads-eu:customer%201"
    ]


async def test_f_s11_foreign_data_is_named_and_passed_over(link: Link, server: Server) -> None:
    """F-S11"""
    expected = fill(server, "reads", 3)
    prefix = keys.bucket(Slot().prefix, "")
    sound = layout.unpack_record(server.command("GET", prefix + b"reads:customer%200"))
    sound.balance = sound.capacity + 1
    server.command("SET", prefix + b"too-full", layout.pack_record(sound))
    server.command("SET", prefix + b"text", "nonsense")
    server.command("RPUSH", prefix + b"list", "a")
    server.command("SET", prefix + b"\xff\n", "nonsense")
    pages = await all_pages(link, PageQuery(limit=2))
    assert set(names_in(pages)) == expected
    unreadable = sorted(name for page in pages for name in page.unreadable)
    assert unreadable == ["\\xff\n", "list", "text", "too-full"]


async def test_few_buckets_among_many_keys_are_found_in_bounded_steps(
    link: Link, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "SCANS_MAX", 2)
    monkeypatch.setattr(inspect, "SCAN_COUNT", 10)
    expected = fill(server, "reads", 2)
    fill(server, "reads", 500, Slot("other"))
    pages = await all_pages(link)
    assert set(names_in(pages)) == expected
    assert len(pages) > 10, "a page costs little, however few it shows"


async def test_buckets_are_shown_on_a_cluster(cluster: Cluster) -> None:
    link = await open_link(cluster.url)
    for namespace in ("default", "orders", "carts", "users"):  # on different nodes
        expected = fill(cluster, "reads", 30, Slot(namespace))
        assert set(names_in(await all_pages(link, PageQuery(namespace, limit=7)))) == expected
    await link.aclose()


@pytest.mark.parametrize("cursor", ["x", "!", "ü", "MTIz", "YTpi", "LTE6", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5Og", "a" * 999])
async def test_a_foreign_cursor_is_refused(link: Link, cursor: str) -> None:
    with pytest.raises(CursorError, match="allowed: the cursor of the previous page"):
        await list_buckets(link, PageQuery(cursor=cursor))


@given(st.integers(0, 2**64 - 1), st.text("abc:,%.-_~!", max_size=20))
def test_cursors_can_be_opened_again(scan: int, after: str) -> None:
    place = inspect._Place(scan, after)
    assert inspect._open_cursor(inspect._close_cursor(place)) == place
