"""F-N1 to F-N6 on a real server: hostile descriptors have buckets of their own, all in their slot (promise 8)."""

from redis.crc import key_slot

from limiter.store import keys
from limiter.store.keys import Slot, bucket_name
from tests.support.operations import acquire, ask, look, work_terms
from tests.support.servers import Server
from tests.support.stores import ScriptStore

TEXTS = [None, "", "!", "%21", "a,b", "{x}", "}", ":", "\0", "\r\n", "\u202e", "\ud800", "~", "x" * 10_000, "*"]


def test_f_n1_to_f_n6_hostile_descriptors_never_spend_each_others_tokens(server: Server) -> None:
    store, terms = ScriptStore(server, Slot("{evil}/0:\n", 0)), work_terms(capacity=100)
    names = [bucket_name("p", [text, other]) for text in TEXTS for other in TEXTS]
    for number, name in enumerate(names):
        acquire(store, ask(terms, bucket=name, charge=number / 4))
    for number, name in enumerate(names):
        assert look(store, terms, bucket=name) == 100 - number / 4
    found = set(server.command("KEYS", keys.bucket(store.prefix, "*")))
    assert len(found) == len(names)
    assert {key_slot(key) for key in server.command("KEYS", "*")} == {key_slot(store.prefix)}


def test_f_n1_to_f_n6_hostile_namespaces_never_share_a_bucket(server: Server) -> None:
    terms = work_terms(capacity=100)
    stores = [ScriptStore(server, Slot(text, 0)) for text in TEXTS if text is not None]
    for number, store in enumerate(stores):
        acquire(store, ask(terms, charge=number))
    assert [look(store, terms) for store in stores] == [100 - number for number in range(len(stores))]
