from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cutline.embedded.bank import ACCOUNTS_PER_SHARD, BankInvariants, accounts_of, half_present, shard_of


def test_every_account_is_on_the_shard_whose_range_holds_it() -> None:
    for shard in range(3):
        accounts = accounts_of(shard)
        assert len(accounts) == ACCOUNTS_PER_SHARD
        assert {shard_of(accounts[0]), shard_of(accounts[-1])} == {shard}
        assert accounts[-1] + 1 == accounts_of(shard + 1)[0]


def row(name: str, from_shard: int, to_shard: int, amount: int = 7) -> tuple[Any, ...]:
    return (name, accounts_of(from_shard)[5], accounts_of(to_shard)[9], amount)


def test_a_transfer_on_both_of_its_shards_is_whole() -> None:
    both = row("a", 0, 2)
    assert half_present([{both}, set(), {both}]) == ()


def test_a_transfer_on_one_of_its_shards_is_half_present() -> None:
    assert half_present([{row("a", 0, 1)}, set()]) == ("a",)
    assert half_present([set(), {row("a", 0, 1)}]) == ("a",)


def test_a_transfer_that_differs_between_its_shards_is_half_present() -> None:
    assert half_present([{row("a", 0, 1, 7)}, {row("a", 0, 1, 8)}]) == ("a",)


def test_a_transfer_on_an_unrelated_shard_is_reported() -> None:
    stray = row("a", 0, 1)
    assert half_present([{stray}, {stray}, {stray}]) == ("a",)
    # A transfer within shard 1, found on shard 0.
    assert half_present([{row("b", 1, 1)}, set()]) == ("b",)


def test_any_single_fault_breaks_the_invariants() -> None:
    sound = BankInvariants(10, 10, (1,), (), ())
    assert sound.hold
    assert not replace(sound, total_balance=9).hold
    assert not replace(sound, half_present=("a",)).hold
    assert not replace(sound, unexplained_accounts=(1,)).hold
