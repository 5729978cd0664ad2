"""Configuration: all mistakes at once, and a round trip."""

from pathlib import Path

import pytest

from twostroke.cluster.config import Config, dump_config, load_config, load_stored, parse_config, with_secrets
from twostroke.cluster.core.errors import ConfigError
from twostroke.cluster.wire.address import advertised_host


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("")
    assert load_config(path) == Config()


def test_what_is_dumped_is_read_back(tmp_path: Path) -> None:
    config = parse_config({"pages": {"num_pages": 7}, "transfer": {"transports": ["grpc"]}, "cluster": "blue"})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_every_mistake_is_reported_with_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"pages": {"num_pages": 0}, "decode": {"lease_ttl_s": -1}, "router": {"htp_port": 1}})
    text = "\n".join(caught.value.mistakes)
    for path in ("pages.num_pages", "decode.lease_ttl_s", "router.htp_port"):
        assert path in text


@pytest.mark.parametrize("data", [{"transfer": {"transports": []}}, {"decode": {"lease_ttl_s": float("inf")}}, [1]])
def test_senseless_values_are_refused(data: object) -> None:
    with pytest.raises(ConfigError):
        parse_config(data)


def test_a_file_that_cannot_be_read_or_parsed_is_a_config_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    for path in (tmp_path / "missing.yaml", broken):
        with pytest.raises(ConfigError, match=path.name):
            load_config(path)


@pytest.mark.parametrize(
    ("worker", "redis_url", "expected"),
    [
        pytest.param({}, "", "127.0.0.1", id="the default is local"),
        pytest.param({"host": "10.1.2.3"}, "", "10.1.2.3", id="where it listens"),
        pytest.param({"host": "0.0.0.0", "advertise": "node-7"}, "", "node-7", id="as configured"),
        pytest.param({"host": "0.0.0.0"}, "redis://127.0.0.1:6379/0", "127.0.0.1", id="the way to Redis"),
    ],
)
def test_the_address_that_a_worker_tells_others(worker: dict[str, str], redis_url: str, expected: str) -> None:
    section = parse_config({"worker": worker}).worker
    assert advertised_host(section.host, section.advertise, redis_url) == expected


@pytest.mark.parametrize(
    "budget",
    [
        {"tenants": {"acme": {"service_class": "gold"}}},
        {"tenants": {"a b": {}}},
        {"classes": {"batch": -1}},
        {"key": "short"},
        {"key": "k" * 16 + "\nshort"},
        {"key": " \n"},
        {"ttl_s": 0.5},
        {"ttl_s": 1e20},
        {"key": "k" * 16, "key_file": "/etc/key"},
        {"tenant_header": "X Tenant"},
    ],
    ids=str,
)
def test_a_senseless_budget_is_refused(budget: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"router\.budget"):
        parse_config({"router": {"budget": budget}})


def test_the_environments_key_counts_before_the_files() -> None:
    config = parse_config({"router": {"budget": {"key_file": "/etc/key", "output_tokens": 5}}})
    assert with_secrets(config, {}) == config
    budget = with_secrets(config, {"TWOSTROKE_CONTINUATION_KEY": "k" * 16}).router.budget
    assert (budget.key, budget.key_file, budget.output_tokens) == ("k" * 16, "", 5)
    with pytest.raises(ConfigError, match="16 characters"):
        with_secrets(config, {"TWOSTROKE_CONTINUATION_KEY": "short"})


def test_nobody_can_be_told_to_connect_to_every_address() -> None:
    with pytest.raises(ConfigError, match=r"worker\.advertise"):
        parse_config({"worker": {"advertise": "0.0.0.0"}})


def test_a_cluster_that_another_version_brought_up_can_still_be_taken_down(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "cluster: blue\nray: {drain_s: 7, new: 1}\nredis: {url: 'redis://h:1/0'}\nother: {}\n"
        "router: {gone: 1, budget: {key: abcdef0123456789, odd: 2}}\n"
    )
    stored = load_stored(path)
    assert (stored.cluster, stored.ray.drain_s, stored.redis.url) == ("blue", 7.0, "redis://h:1/0")
    assert stored.router.budget.key == "abcdef0123456789"
    path.write_text("router: 5\nredis: []\n")
    assert load_stored(path) == Config()
    for text in ("[]", "cluster: 5", "ray: {drain_s: soon}"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            load_stored(path)
