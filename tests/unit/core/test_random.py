"""Golden vectors of the randomness that every worker and kernel must share."""

import pytest

from twostroke.cluster.core.random import choice_seed, draw_seed, philox4x32, splitmix64, uniform

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        # The known-answer vectors of the authors' Random123 distribution.
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL), (FULL, FULL, FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_its_authors(
    key: tuple[int, int], counter: tuple[int, int, int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(key, counter) == expected


GOLDEN = [
    (0, 0, "0x1.c2d38b1acc4fdp-1"),
    (0, 1, "0x1.72c8036fe3932p-2"),
    (1, 0, "0x1.ca141d79c7d00p-1"),
    (42, 7, "0x1.a1e132156ef60p-2"),
    (2**63 - 1, 2**32 + 5, "0x1.e319c4c4bcb80p-3"),
    (2**64 - 1, 2**64 - 1, "0x1.0c2b196934634p-2"),
]


@pytest.mark.parametrize(("seed", "index", "expected"), GOLDEN)
def test_uniform_is_what_it_was(seed: int, index: int, expected: str) -> None:
    assert uniform(seed, index).hex() == expected


def test_uniform_is_below_one_and_spread_evenly() -> None:
    draws = [uniform(seed, index) for seed in range(20) for index in range(100)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02
    assert len(set(draws)) == len(draws)


def test_splitmix_matches_its_authors() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF


def test_choices_have_seeds_of_their_own() -> None:
    seeds = [choice_seed(7, choice) for choice in range(128)]
    assert len(set(seeds)) == 128
    assert choice_seed(2**64 - 1, 1) == choice_seed(0, 0)


def test_a_drawn_seed_fits_a_signed_wire_type() -> None:
    assert all(0 <= draw_seed() < 2**63 for _ in range(100))
