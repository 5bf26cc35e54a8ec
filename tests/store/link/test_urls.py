"""Store URLs: those that are understood, and the messages for those that are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.store.link.urls import Target, UrlError, mask, parse


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
        ("localhost:6379", "unsupported scheme"),
        ("http://store", "unsupported scheme http://"),
        ("redis+tls://store", "unsupported scheme redis+tls://"),
        ("redis://", "a host is missing, or not of the form host:port"),
        ("redis://store:six", "a host is missing, or not of the form host:port"),
        ("redis://one,,two", "a host is missing, or not of the form host:port"),
        ("redis://[::1", "it cannot be read"),
        ("redis://store:65536", "ports go from 1 to 65535"),
        ("redis://store/first", "the database after the last / is not a number"),
        ("redis://store?db=first", "option db has a value that is not understood"),
        ("redis://one,two", "several hosts need redis+sentinel:// or redis+cluster://"),
        ("redis://store?socket_timeout=5", "an option is not supported; supported: db"),
        ("redis://store?ssl_ca_certs=x", "option ssl_ca_certs is not supported (TLS needs rediss://); supported: db"),
        ("unix://run/redis.sock", "the path must be absolute, as in unix:///run/redis.sock"),
        ("unix://", "it names no socket"),
        ("redis+sentinel://one,two", "it names no service: add /service after the hosts"),
        ("redis+cluster://one/1", "a cluster has only database 0"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url: str, why: str) -> None:
    with pytest.raises(UrlError) as refused:
        parse(url)
    assert f" is not a store URL: {why}; the forms are redis://" in str(refused.value)


SECRET = "s3cr3t-w0rd"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}",
        f"redis://user:{SECRET}",
        f"redis://user:{SECRET}@",
        f"redis://user:{SECRET}@:6379",
        f"redis://user:{SECRET}@host:99999",
        f"redis://user:{SECRET}@host:port",
        f"redis://user:{SECRET}@host/notanumber",
        f"redis://user:{SECRET}/more@host",
        f"redis://user:{SECRET}?more@host",
        f"redis://user:{SECRET}#more@host",
        f"redis://user:[{SECRET}@host",
        f"redis://user:{SECRET}]@host",
        f"redis://user:\u2100{SECRET}@host",
        f"redis:user:{SECRET}@host",
        f"redis:/user:{SECRET}@host",
        f"redis//user:{SECRET}@host",
        f"user:{SECRET}@host:6379",
        f"{SECRET}:6379",
        f"{SECRET}@host",
        SECRET,
        f"{SECRET}://host",
        f"redis://host?{SECRET}=1",
        f"redis://host?db={SECRET}",
        f"redis://host?password={SECRET}",
        f"redis://host/0?pass%77ord={SECRET}",
        f"rediss://host?ssl_passwor={SECRET}",
        f"redis+sentinel://:{SECRET}",
        f"redis+sentinel://:{SECRET}@host",
        f"redis+cluster://:{SECRET}@host/5",
        f"unix://:{SECRET}",
        f"unix://user:{SECRET}@host/path",
        f"redis://host:{'9' * 5000}{SECRET}",
        f" redis://:{SECRET}@",
        f"redis://\n:{SECRET}",
    ],
)
def test_a_bad_url_shows_nothing_of_a_password(url: str) -> None:
    """A URL without a host (`redis://:password`) was printed whole at start."""
    with pytest.raises(UrlError) as refused:
        parse(url)
    for shown in (str(refused.value), repr(refused.value), mask(url)):
        assert SECRET not in shown
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://store", "redis://store:6379"),
        ("redis://store/2", "redis://store:6379?db=2"),
        ("redis://user:pass@store", "redis://***@store:6379"),
        ("redis://user:pa@ss@store", "redis://***@store:6379"),
        ("redis://:pass@[::1]:7000", "redis://***@[::1]:7000"),
        ("unix://u:p@/run/a%20b.sock", "unix://***@/run/a%20b.sock"),
        ("rediss://store?ssl_password=x&db=1", "rediss://store:6379?db=1&ssl_password=***"),
        ("rediss://store?ssl_pass%77ord=x", "rediss://store:6379?ssl_password=***"),
        ("redis+sentinel://a/s?sentinel_password=x", "redis+sentinel://a:26379/s?sentinel_password=***"),
        ("redis+cluster://:pass@one,two:7000", "redis+cluster://***@one:6379,two:7000"),
    ],
)
def test_a_shown_url_hides_what_is_secret(url: str, shown: str) -> None:
    assert mask(url) == shown
    parse(url)


@given(
    st.text(max_size=40), st.sampled_from(["redis://", "rediss+cluster://u:", "unix://", "redis:", "", "redis://h?"])
)
def test_whatever_is_entered_is_shown_only_where_it_was_understood(noise: str, start: str) -> None:
    url = f"{start}{noise}{SECRET}"
    said = mask(url)
    try:
        parse(url)
    except UrlError as refused:
        said += str(refused)
    else:
        said = ""  # it is a host, a path or a service, and no password
    assert SECRET not in said
