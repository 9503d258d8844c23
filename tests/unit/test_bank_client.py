from __future__ import annotations

import random

from cutline.embedded.bank import shard_of
from cutline.embedded.bank_workload import Transfer, choose_transfer


def choose_transfers(seed: int, *, shards: int, cross_shard_ratio: float, count: int = 400) -> list[Transfer]:
    chance = random.Random(seed)
    return [choose_transfer(chance, shards, cross_shard_ratio) for _ in range(count)]


def test_accounts_are_locked_in_the_order_of_their_ids_across_shards_too() -> None:
    for transfer in choose_transfers(1, shards=3, cross_shard_ratio=0.5):
        (first, first_change), (second, second_change) = transfer.changes
        assert first < second
        assert shard_of(first) <= shard_of(second)
        assert first_change + second_change == 0


def test_the_ratio_decides_how_many_transfers_cross_shards() -> None:
    assert not any(transfer.crosses for transfer in choose_transfers(2, shards=3, cross_shard_ratio=0))
    assert all(transfer.crosses for transfer in choose_transfers(2, shards=3, cross_shard_ratio=1))
    some = sum(transfer.crosses for transfer in choose_transfers(2, shards=3, cross_shard_ratio=0.5))
    assert 150 < some < 250


def test_with_one_shard_nothing_crosses() -> None:
    assert not any(transfer.crosses for transfer in choose_transfers(3, shards=1, cross_shard_ratio=1))


def test_a_seed_repeats_the_choices_but_never_an_id() -> None:
    first = choose_transfers(4, shards=2, cross_shard_ratio=0.5)
    again = choose_transfers(4, shards=2, cross_shard_ratio=0.5)
    assert [(t.from_account, t.to_account, t.amount) for t in first] == [
        (t.from_account, t.to_account, t.amount) for t in again
    ]
    assert len({transfer.id for transfer in first + again}) == len(first + again)
