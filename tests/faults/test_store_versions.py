"""F-S13: a server too old, or without Lua, is refused with a message that says what to change."""

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from limiter.store.link.connect import Link, open_link, probe
from limiter.store.store_errors import StoreUnsupported
from tests.support.fake import FakeServer, bulk
from tests.support.servers import Flavour, Server, running

TOO_OLD = "is too old: Headgate needs Redis 7.0 or Valkey 8.0, or newer; upgrade the server"
BUNDLED = "or unset HEADGATE_REDIS_URL to use the bundled Valkey"

# A reply as PROBE_SCRIPT gives it: the number 0.1 as it came, seconds, microseconds.
SCRIPT_REPLY = b"*3\r\n$8\r\n\x9a\x99\x99\x99\x99\x99\xb9\x3f\r\n$4\r\n1000\r\n$2\r\n17\r\n"


async def refusal(url: str) -> str:
    async with aclosing(await open_link(url)) as link:
        return await refusal_over(link)


async def refusal_over(link: Link) -> str:
    with pytest.raises(StoreUnsupported) as refused:
        await probe(link)
    return str(refused.value)


@pytest.mark.parametrize(
    ("info", "what"),
    [
        ("redis_version:6.2.14", "Redis 6.2.14"),
        ("redis_version:5.0.0", "Redis 5.0.0"),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:7.2.5", "Valkey 7.2.5"),
        ("loading:0", "Redis of unknown version"),
    ],
)
async def test_f_s13_a_server_too_old_is_refused_with_the_fix(info: str, what: str) -> None:
    async with FakeServer({"INFO": bulk(f"# Server\r\n{info}\r\n")}) as fake:
        message = await refusal(fake.url)
    assert message.startswith(f"{what} {TOO_OLD}")
    assert message.endswith(BUNDLED)


@pytest.mark.parametrize(
    ("info", "name", "version"),
    [
        ("redis_version:7.0.0", "redis", (7, 0, 0)),
        ("redis_version:8.4.0", "redis", (8, 4, 0)),
        ("redis_version:7.2.4\r\nvalkey_version:8.0.1", "valkey", (8, 0, 1)),
    ],
)
async def test_f_s13_the_oldest_that_will_do_are_accepted(info: str, name: str, version: Any) -> None:
    async with (
        FakeServer({"INFO": bulk(f"# Server\r\n{info}\r\n"), "EVAL": SCRIPT_REPLY}) as fake,
        aclosing(await open_link(fake.url)) as link,
    ):
        facts = await probe(link)
    assert (facts.name, facts.version, facts.now_us) == (name, version, 1_000_000_017)


@pytest.mark.parametrize("flavour", ["valkey", "redis"])
async def test_f_s13_a_server_without_eval_is_refused_with_the_fix(flavour: Flavour, tmp_path: Path) -> None:
    with running(flavour, tmp_path, config={"rename-command": 'EVAL ""'}) as server:
        message = await refusal(server.url)
    assert message.startswith("the server cannot run Lua scripts (unknown command 'EVAL'")
    assert "do not rename EVAL, EVALSHA and SCRIPT" in message
    assert message.endswith(BUNDLED)


@pytest.mark.parametrize("denied", ["-@scripting", "-info", "-time"])
async def test_f_s13_a_user_who_may_not_run_scripts_is_refused_with_the_fix(server: Server, denied: str) -> None:
    """Also when the right is missing only inside the script."""
    server.command("ACL", "SETUSER", "clerk", "reset", "on", ">word", "~*", "&*", "+@all", denied)
    try:
        message = await refusal(server.url.replace("unix://", "unix://clerk:word@"))
    finally:
        server.command("ACL", "DELUSER", "clerk")
    assert message.startswith("the store user lacks rights (")
    assert "ACL SETUSER <user> on ~hg:* &hg:* +@all -@dangerous +info" in message


async def test_f_s13_the_rights_that_the_message_names_are_enough(server: Server) -> None:
    rights = ["on", "~hg:*", "&hg:*", "+@all", "-@dangerous", "+info"]
    server.command("ACL", "SETUSER", "clerk", "reset", ">word", *rights)
    try:
        async with aclosing(await open_link(server.url.replace("unix://", "unix://clerk:word@"))) as link:
            assert (await probe(link)).name == server.flavour
    finally:
        server.command("ACL", "DELUSER", "clerk")


async def test_f_s13_numbers_that_lua_alters_are_noticed() -> None:
    info = bulk("redis_version:7.2.0\r\n")
    async with FakeServer({"INFO": info, "EVAL": SCRIPT_REPLY.replace(b"\x9a", b"\x00")}) as fake:
        assert "alters numbers" in await refusal(fake.url)
