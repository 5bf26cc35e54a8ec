"""Store URLs: what is understood, and what is said when it is not."""

import pytest

from limiter.store.urls import Target, UrlError, mask, parse


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://store", Target("server", addresses=(("store", 6379),))),
        ("redis://store:6380/2", Target("server", addresses=(("store", 6380),), options={"db": 2})),
        ("redis://store?db=2", Target("server", addresses=(("store", 6379),), options={"db": 2})),
        ("redis://[::1]:6380", Target("server", addresses=(("::1", 6380),))),
        (
            "redis://:p%40ss%2Fword@store",
            Target("server", addresses=(("store", 6379),), options={"password": "p@ss/word"}),
        ),
        (
            "redis://us%3Aer:pass@store",
            Target("server", addresses=(("store", 6379),), options={"username": "us:er", "password": "pass"}),
        ),
        ("unix:///run/my%20redis.sock", Target("server", path="/run/my redis.sock")),
        (
            "unix://u:p@/run/s?db=1",
            Target("server", path="/run/s", options={"username": "u", "password": "p", "db": 1}),
        ),
        (
            "rediss://store?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=no",
            Target(
                "server",
                tls=True,
                addresses=(("store", 6379),),
                options={"ssl_ca_certs": "/etc/ca.pem", "ssl_check_hostname": False},
            ),
        ),
        (
            "redis+sentinel://u:p@one,two:26380/orders/3?sentinel_password=q",
            Target(
                "sentinel",
                addresses=(("one", 26379), ("two", 26380)),
                service="orders",
                options={"username": "u", "password": "p", "db": 3},
                sentinel_options={"password": "q"},
            ),
        ),
        (
            "rediss+sentinel://one/orders?ssl_ca_certs=ca",
            Target(
                "sentinel",
                tls=True,
                addresses=(("one", 26379),),
                service="orders",
                options={"ssl_ca_certs": "ca"},
                sentinel_options={"ssl_ca_certs": "ca"},
            ),
        ),
        (
            "redis+cluster://:p@one:7000,[::1]:7001",
            Target("cluster", addresses=(("one", 7000), ("::1", 7001)), options={"password": "p"}),
        ),
        ("rediss+cluster://one/0", Target("cluster", tls=True, addresses=(("one", 6379),))),
    ],
)
def test_every_form_is_understood(url: str, target: Target) -> None:
    assert parse(url) == target


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "it has no scheme"),
        ("localhost:6379", "localhost:// is none of ours"),
        ("http://store", "http:// is none of ours"),
        ("redis+tls://store", "redis+tls:// is none of ours"),
        ("redis://", "a host is missing, or not of the form host:port"),
        ("redis://store:six", "a host is missing, or not of the form host:port"),
        ("redis://one,,two", "a host is missing, or not of the form host:port"),
        ("redis://[::1", "Invalid IPv6 URL"),
        ("redis://store:65536", "ports go from 1 to 65535"),
        ("redis://store/first", "the database after the last / is not a number"),
        ("redis://store?db=first", "option db has a value that is not understood"),
        ("redis://one,two", "several hosts need redis+sentinel:// or redis+cluster://"),
        ("redis://store?socket_timeout=5", "option socket_timeout is not known here; known: db"),
        ("redis://store?ssl_ca_certs=x", "option ssl_ca_certs is not known here (TLS needs rediss://); known: db"),
        ("unix://run/redis.sock", "the path must be absolute, as in unix:///run/redis.sock"),
        ("unix://", "it names no socket"),
        ("redis+sentinel://one,two", "it names no service: add /service after the hosts"),
        ("redis+cluster://one/1", "a cluster has only database 0"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url: str, why: str) -> None:
    with pytest.raises(UrlError) as refused:
        parse(url)
    assert str(refused.value).startswith(f"{url} is not a store URL: {why}; the forms are redis://")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://store", "redis://store"),
        ("redis://user:pass@store", "redis://***@store"),
        ("redis://user:pa@ss@store", "redis://***@store"),
        ("rediss://store?ssl_password=x&db=1", "rediss://store?ssl_password=***&db=1"),
        ("redis+sentinel://a/s?sentinel_password=x", "redis+sentinel://a/s?sentinel_password=***"),
    ],
)
def test_a_shown_url_hides_what_is_secret(url: str, shown: str) -> None:
    assert mask(url) == shown
