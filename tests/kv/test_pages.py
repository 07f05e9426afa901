from __future__ import annotations

import random

import pytest

from topg.errors import CapacityError, ConfigError
from topg.kv.pages import KVGeometry, PageAccountingError, PagePool, PageTable, tokens_per_page


def test_geometry_counts_keys_and_values_of_all_layers() -> None:
    geometry = KVGeometry(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", tokens_per_page=64)
    assert geometry.bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert geometry.bytes_per_page == 64 * geometry.bytes_per_token


@pytest.mark.parametrize(
    ("bytes_per_token", "page_size", "tokens"),
    [
        (23_040, None, 64),  # 182 tokens fit the default size, which stops at 64
        (131_072, None, 32),
        (1_000_000, None, 32),  # at least 32, whatever the size
        (23_040, 4 * 1024**2, 160),  # an explicit size is obeyed
        (23_040, 1, 32),
        (1000, 96_000, 96),
        (1000, 95_999, 64),
    ],
)
def test_tokens_per_page(bytes_per_token: int, page_size: int | None, tokens: int) -> None:
    assert tokens_per_page(bytes_per_token, page_size) == tokens


def test_page_size_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="page_size is 0"):
        tokens_per_page(1000, 0)


def test_a_pool_needs_pages() -> None:
    with pytest.raises(ConfigError, match="0 pages"):
        PagePool(0, 32)


def test_allocate_is_all_or_nothing() -> None:
    pool = PagePool(3, 32)
    taken = pool.allocate(2)
    with pytest.raises(CapacityError, match="2 KV pages of 32 tokens are needed and 1 of 3"):
        pool.allocate(2)
    assert (pool.free_count, pool.used_count) == (1, 2)
    pool.release(taken)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_double_release_is_an_error() -> None:
    pool = PagePool(2, 32)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(PageAccountingError, match=f"page {page} was released while it is free"):
        pool.release([page])
    with pytest.raises(PageAccountingError, match="page 7 was released; the pool has pages 0 to 1"):
        pool.release([7])


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(PageAccountingError, match="page 0 was shared while it is free"):
        PagePool(1, 32).share(0)


def test_grow_takes_pages_only_when_the_last_one_is_full() -> None:
    table = PageTable(PagePool(4, 32))
    table.grow(32)
    assert len(table.pages) == 1
    table.grow(1)
    assert len(table.pages) == 2
    table.grow(31)
    assert (len(table.pages), table.token_count) == (2, 64)


def test_grow_changes_nothing_when_the_pool_is_empty() -> None:
    pool = PagePool(1, 32)
    table = PageTable(pool)
    table.grow(20)
    with pytest.raises(CapacityError):
        table.grow(13)
    assert (table.token_count, len(table.pages), pool.free_count) == (20, 1, 0)
    pool.check([table])


def test_copy_on_write_copies_only_shared_pages_that_are_written() -> None:
    pool = PagePool(8, 32)
    first = PageTable(pool)
    first.grow(40)
    second = first.fork()
    assert pool.used_count == 2
    old = list(first.pages)
    assert second.pages_needed(30) == 2  # one more page, and a copy of the half full one
    second.grow(30)
    copies = second.writable(40, 70)
    assert copies == ((old[1], second.pages[1]),)
    assert list(first.pages) == old
    assert second.pages[0] == old[0]
    assert second.writable(40, 70) == ()
    first.grow(1)
    assert first.writable(40, 41) == ()  # the other reader has its own copy now
    pool.check([first, second])


def test_writable_changes_nothing_when_the_pool_is_empty() -> None:
    pool = PagePool(1, 32)
    first = PageTable(pool)
    first.grow(10)
    second = first.fork()
    second.grow(1)
    with pytest.raises(CapacityError):
        second.writable(10, 11)
    assert list(second.pages) == list(first.pages)
    pool.check([first, second])


def test_check_names_a_leaked_page() -> None:
    pool = PagePool(4, 32)
    table = PageTable(pool)
    table.grow(1)
    with pytest.raises(PageAccountingError, match=f"page {table.pages[0]} leaked: it has 1 readers and 0 page tables"):
        pool.check([])


def test_check_names_a_page_used_after_release() -> None:
    pool = PagePool(4, 32)
    table = PageTable(pool)
    table.grow(1)
    pool.release(table.pages)
    with pytest.raises(PageAccountingError, match=f"page {table.pages[0]} is used after its release"):
        pool.check([table])


def test_check_names_a_page_owned_twice() -> None:
    pool = PagePool(4, 32)
    first, second = PageTable(pool), PageTable(pool)
    first.grow(1)
    second.grow(1)
    stolen = first.pages[0]
    pool.release(second.pages)
    second._pages[0] = stolen
    with pytest.raises(PageAccountingError, match=f"page {stolen} is owned twice"):
        pool.check([first, second])


def test_check_names_a_page_twice_in_one_table() -> None:
    pool = PagePool(4, 32)
    table = PageTable(pool)
    table.grow(64)
    table._pages[1] = table._pages[0]
    with pytest.raises(PageAccountingError, match="appears 2 times in one page table"):
        pool.check([table])


@pytest.mark.parametrize("seed", range(20))
def test_random_traces_keep_the_books(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(rng.randint(1, 24), 32)
    tables: list[PageTable] = [PageTable(pool)]
    for _ in range(200):
        _random_action(rng, pool, tables)
        pool.check(tables)
    for table in tables:
        table.release()
    pool.check([])
    assert pool.free_count == pool.page_count


def _random_action(rng: random.Random, pool: PagePool, tables: list[PageTable]) -> None:
    table = rng.choice(tables)
    action = rng.choice(["grow", "grow", "grow", "fork", "release", "new"])
    if action == "grow":
        _grow_and_write(rng, pool, table)
    elif action == "fork":
        tables.append(table.fork())
    elif action == "new":
        tables.append(PageTable(pool))
    else:
        table.release()


def _grow_and_write(rng: random.Random, pool: PagePool, table: PageTable) -> None:
    start, new = table.token_count, rng.choice([1, 1, 7, 32, 100])
    needed, free = table.pages_needed(new), pool.free_count
    if needed > free:
        with pytest.raises(CapacityError):
            table.grow(new)
            table.writable(start, start + new)
        return
    table.grow(new)
    for source, target in table.writable(start, start + new):
        assert source != target
    assert free - pool.free_count == needed
    assert not any(pool.is_shared(page) for page in table.pages[start // 32 :])
