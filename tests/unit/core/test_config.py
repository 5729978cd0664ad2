"""Configuration: all mistakes at once, and a round trip."""

from pathlib import Path

import pytest

from twostroke.cluster.config import Config, dump_config, load_config, load_stored, parse_config
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


def test_nobody_can_be_told_to_connect_to_every_address() -> None:
    with pytest.raises(ConfigError, match=r"worker\.advertise"):
        parse_config({"worker": {"advertise": "0.0.0.0"}})


def test_a_cluster_that_another_version_brought_up_can_still_be_taken_down(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "cluster: blue\nray: {drain_s: 7, new: 1}\nredis: {url: 'redis://h:1/0'}\nother: {}\nrouter: {gone: 1}\n"
    )
    stored = load_stored(path)
    assert (stored.cluster, stored.ray.drain_s, stored.redis.url) == ("blue", 7.0, "redis://h:1/0")
    for text in ("[]", "cluster: 5", "ray: {drain_s: soon}"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            load_stored(path)
