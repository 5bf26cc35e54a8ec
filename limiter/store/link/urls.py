"""Store URLs: the place of the store, its kind, and the credentials in one string.

    redis://[user:password@]host[:port][/db]                       one server
    rediss://…?ssl_ca_certs=/etc/ssl/ca.pem                        the same over TLS
    unix://[user:password@]/path/to/socket[?db=0]                  one server on this machine
    redis+sentinel://[user:password@]host[:port],…/service[/db]    the primary that Sentinel names
    redis+cluster://[user:password@]host[:port],…                  Redis Cluster

`rediss+sentinel` and `rediss+cluster` use TLS. User, password and path are percent-encoded. No message made here shows
a password: of a URL that was parsed it shows the parts that cannot be secret, of any other only the scheme.
"""

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from redis.asyncio.connection import URL_QUERY_ARGUMENT_PARSERS

FORMS = (
    "redis://host:port/db, rediss://host:port/db, unix:///path/to/socket, "
    "redis+sentinel://host:port,host:port/service, redis+cluster://host:port,host:port"
)

PORT = 6379
SENTINEL_PORT = 26379

TLS_OPTIONS = frozenset({
    "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname",
    "ssl_ciphers", "ssl_keyfile", "ssl_password",
})  # fmt: skip
SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
OPTIONS = frozenset({"db"}) | TLS_OPTIONS | SENTINEL_OPTIONS
_SHOWN_OPTIONS = ("db", *sorted(TLS_OPTIONS), *sorted(SENTINEL_OPTIONS))
_OTHER_SCHEMES = frozenset({"http", "https", "memcached", "redis+tls", "redis+ssl", "tcp", "tls", "valkey", "valkeys"})
_SCHEME = re.compile(r"(?:unix|rediss?(?:\+sentinel|\+cluster)?)://")

Kind = Literal["server", "sentinel", "cluster"]
Address = tuple[str, int]


class UrlError(ValueError):
    """A store URL that cannot be parsed; the message says what is wrong and which forms are supported."""


class _Unfit(ValueError):
    """The fault of a URL, in words that repeat nothing of it."""


@dataclass(frozen=True)
class Target:
    """A parsed store URL. `options` are redis-py's names for what every connection needs."""

    kind: Kind
    tls: bool = False
    addresses: tuple[Address, ...] = ()
    path: str = ""
    service: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    sentinel_options: Mapping[str, Any] = field(default_factory=dict)


def mask(url: str) -> str:
    """Return the URL for display: composed from its parsed parts, with every secret as `***`."""
    try:
        target = _parse(urlsplit(url))
    except ValueError:
        return _unreadable(url)
    hosts = ",".join(_host(address) for address in target.addresses)
    user = "***@" if {"username", "password"} & target.options.keys() else ""
    place = quote(target.path or (f"/{target.service}" if target.service else ""))
    more = {**target.options, **{f"sentinel_{name}": value for name, value in target.sentinel_options.items()}}
    options = [f"{name}={_shown(name, more[name])}" for name in _SHOWN_OPTIONS if name in more]
    return f"{urlsplit(url).scheme}://{user}{hosts}{place}{'?' if options else ''}{'&'.join(options)}"


def _unreadable(url: str) -> str:
    """Return what can be shown of a URL that was not parsed: any part of it may be a password."""
    scheme = _SCHEME.match(url)
    return f"{scheme[0]}***" if scheme else "this text"


def _host(address: Address) -> str:
    host, port = address
    host = f"[{host}]" if ":" in host else quote(host)
    return f"{host}:{port}"


def _shown(name: str, value: object) -> str:
    return "***" if name.endswith(("password", "username", "_data")) else quote(str(value), safe="/")


def parse(url: str) -> Target:
    """Parse a store URL, or raise `UrlError`."""
    try:
        return _parse(urlsplit(url))
    except _Unfit as error:
        raise UrlError(f"{_unreadable(url)} is not a store URL: {error}; the forms are {FORMS}") from None
    except ValueError:  # urlsplit's message may repeat the URL
        raise UrlError(f"{_unreadable(url)} is not a store URL: it cannot be read; the forms are {FORMS}") from None


def _parse(url: SplitResult) -> Target:
    if "@" in url.path + url.query or url.fragment:
        # Most likely part of the password, so no message may repeat it.
        raise _Unfit("/, ?, # and @ in a user, password or path must be percent-encoded")
    match url.scheme.partition("+"):
        case "unix", "", "":
            return _parse_unix(url)
        case "redis" | "rediss" as transport, "", "":
            return _parse_server(url, tls=transport == "rediss")
        case "redis" | "rediss" as transport, "+", "sentinel":
            return _parse_sentinel(url, tls=transport == "rediss")
        case "redis" | "rediss" as transport, "+", "cluster":
            return _parse_cluster(url, tls=transport == "rediss")
    if url.scheme in _OTHER_SCHEMES:
        raise _Unfit(f"unsupported scheme {url.scheme}://")
    # Not repeated: in `name:password@host` everything before the first colon counts as the scheme.
    raise _Unfit("unsupported scheme" if url.scheme else "it has no scheme")


def _parse_unix(url: SplitResult) -> Target:
    if url.netloc.rpartition("@")[2]:
        raise _Unfit("the path must be absolute, as in unix:///run/redis.sock")
    if not url.path.strip("/"):
        raise _Unfit("it names no socket")
    return Target("server", path=unquote(url.path), options=_credentials(url) | _query(url, {"db"}))


def _parse_server(url: SplitResult, *, tls: bool) -> Target:
    addresses = _addresses(url, PORT)
    if len(addresses) > 1:
        raise _Unfit("several hosts need redis+sentinel:// or redis+cluster://")
    options = _credentials(url) | _db(url.path.strip("/")) | _query(url, {"db"} | _tls_options(tls))
    return Target("server", tls=tls, addresses=addresses, options=options)


def _parse_sentinel(url: SplitResult, *, tls: bool) -> Target:
    service, _, db = url.path.strip("/").partition("/")
    if not service:
        raise _Unfit("it names no service: add /service after the hosts")
    query = _query(url, {"db"} | _tls_options(tls) | SENTINEL_OPTIONS)
    # Sentinels have their own accounts, without a password unless one is given.
    sentinel = {name.removeprefix("sentinel_"): query.pop(name) for name in SENTINEL_OPTIONS & query.keys()}
    sentinel |= {name: query[name] for name in TLS_OPTIONS & query.keys()}
    return Target(
        "sentinel",
        tls=tls,
        addresses=_addresses(url, SENTINEL_PORT),
        service=unquote(service),
        options=_credentials(url) | _db(db) | query,
        sentinel_options=sentinel,
    )


def _parse_cluster(url: SplitResult, *, tls: bool) -> Target:
    if url.path.strip("/") not in ("", "0"):
        raise _Unfit("a cluster has only database 0")
    options = _credentials(url) | _query(url, _tls_options(tls))
    return Target("cluster", tls=tls, addresses=_addresses(url, PORT), options=options)


def _addresses(url: SplitResult, default_port: int) -> tuple[Address, ...]:
    hosts = url.netloc.rpartition("@")[2]
    return tuple(_address(text, default_port) for text in hosts.split(","))


def _address(text: str, default_port: int) -> Address:
    """Parse `host`, `host:port`, `[v6]` or `[v6]:port`. No message repeats the text: it may be half a password."""
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::(\d+))?", text)
    if found is None:
        raise _Unfit("a host is missing, or not of the form host:port")
    port = int(found[3] or default_port)
    if not 0 < port < 65536:
        raise _Unfit("ports go from 1 to 65535")
    return found[1] or unquote(found[2]), port


def _credentials(url: SplitResult) -> dict[str, Any]:
    user, _, password = url.netloc.rpartition("@")[0].partition(":")
    given = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


def _db(text: str) -> dict[str, Any]:
    if text and not text.isdecimal():
        raise _Unfit("the database after the last / is not a number")
    return {"db": int(text)} if text else {}


def _tls_options(tls: bool) -> frozenset[str]:
    return TLS_OPTIONS if tls else frozenset()


def _query(url: SplitResult, allowed: AbstractSet[str]) -> dict[str, Any]:
    """Parse the options after `?`. Only a few are allowed: timeouts and retries are set by Headgate."""
    options: dict[str, Any] = {}
    for name, value in parse_qsl(url.query, keep_blank_values=True):
        if name not in allowed:
            hint = " (TLS needs rediss://)" if name in TLS_OPTIONS else ""
            known = ", ".join(sorted(allowed)) or "none"
            shown = f"option {name}" if name in OPTIONS else "an option"
            raise _Unfit(f"{shown} is not supported{hint}; supported: {known}")
        read = URL_QUERY_ARGUMENT_PARSERS.get(name, str)
        try:
            options[name] = read(value)
        except ValueError:
            raise _Unfit(f"option {name} has a value that is not understood") from None
    return options
