"""F-S10: losses that nobody has acknowledged are merged into one record, whichever node noticed what."""

from contextlib import aclosing

import msgspec

from limiter.store import keys
from limiter.store.link.connect import open_link
from limiter.store.policies import losses
from limiter.store.policies.losses import POLICIES_MAX, TIMES_MAX, Acknowledged, Loss, noticed
from tests.support.servers import Server


def lost(life: str, *names: str, before: int = 3, at: int = 1, more: int = 0, went_back: bool = False) -> Loss:
    return noticed(at, life, before, 0, (tuple(("default", name) for name in names), more), went_back=went_back)


def names(loss: Loss) -> list[str]:
    return [name for _, name in loss.policies]


def test_two_losses_are_named_and_counted_in_one() -> None:
    both = lost("a", "one", at=5).with_(lost("b", "two", "three", at=9, before=4))
    assert (names(both), len(both.times), both.when_us, both.last_us) == (["one", "three", "two"], 2, 5, 9)
    assert (both.life, both.before, both.gone) == ("b", 4, 3)
    assert both.with_(both) is both
    assert both.with_(lost("b", "two", at=11, before=4)) is both, "another node noticed the same"
    assert msgspec.json.decode(msgspec.json.encode(both), type=Loss) == both


def test_a_node_that_knew_more_of_the_same_loss_adds_it() -> None:
    both = lost("a", "one", at=5).with_(lost("a", "one", "two", at=6, before=4))
    assert (names(both), len(both.times), both.when_us, both.before) == (["one", "two"], 1, 5, 4)


def test_an_older_copy_twice_in_one_life_is_two_losses() -> None:
    both = lost("a", "one", before=5, went_back=True).with_(lost("a", "two", before=4, at=2, went_back=True))
    assert (names(both), len(both.times)) == (["one", "two"], 2)


def test_an_acknowledgement_covers_the_losses_it_was_shown_and_no_more() -> None:
    one, two = lost("a", "one"), lost("b", "two", at=2)
    assert Acknowledged("ada", 3, one.with_(two)).covers(one)
    assert Acknowledged("ada", 3, one.with_(two)).covers(two)
    assert not Acknowledged("ada", 3, one).covers(one.with_(two))


def test_a_record_stays_bounded_however_often_policies_are_lost() -> None:
    whole = lost("0", "first")
    for number in range(1, 3 * TIMES_MAX):
        whole = whole.with_(lost(str(number), f"p{number:04}", f"q{number:04}", at=number + 1))
    assert (len(whole.policies), len(whole.times), whole.when_us) == (POLICIES_MAX, TIMES_MAX, 1)
    assert whole.gone >= 2 * TIMES_MAX
    assert whole.with_(whole) is whole


def test_the_record_of_an_older_version_is_read_and_merged() -> None:
    old = msgspec.json.decode(b'[5,"a",3,0,[["default","one"]],0]', type=Loss)
    assert (len(old.times), old.last_us) == (1, 5)
    assert names(old.with_(lost("b", "two", at=7))) == ["one", "two"]
    assert old.with_(lost("a", "one", at=7)) is old


async def test_f_s11_a_damaged_loss_counts_as_none(valkey: Server) -> None:
    valkey.client().set(keys.POLICIES_LOSS, b"\xff not ours")
    async with aclosing(await open_link(valkey.url)) as link:
        assert await losses.read(link) == (None, None)
