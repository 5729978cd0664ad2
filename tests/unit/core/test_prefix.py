"""Prefix keys: golden vectors, separation of kinds, and the same value in every process."""

import os
import subprocess
import sys

import pytest

from twostroke.cluster.core.prefix import child_key, max_hit_pages, page_keys, root_key

ROOT = "527db7cfeec989f0b87b3b498fa3c505"
KEYS = ["39d75ffc49fe6f631590e2c0d846dc30", "0762ca8b0e19d54591725c9402475e6a"]


def test_keys_are_what_they_were() -> None:
    assert root_key("fake", 4).hex() == ROOT
    assert [key.hex() for key in page_keys(root_key("fake", 4), range(10), 4)] == KEYS


def test_keys_are_the_same_in_processes_with_other_hash_seeds() -> None:
    """FIELD-REPORTS B10."""
    program = (
        "from twostroke.cluster.core.prefix import *; "
        "print([key.hex() for key in page_keys(root_key('fake', 4), range(10), 4)])"
    )
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=30)
        assert run.stdout.decode().strip() == str(KEYS), run.stderr.decode()


def test_kinds_and_neighbours_do_not_collide() -> None:
    """FIELD-REPORTS B18: adapter X is not salt X, and no field runs into the next."""
    roots = [
        root_key("m", 4),
        root_key("m", 16),
        root_key("m", 4, adapter="x"),
        root_key("m", 4, salt="x"),
        root_key("mx", 4),
        root_key("m", 4, adapter="x", salt="y"),
        root_key("m", 4, adapter="xy"),
        root_key("m", 4, salt="xy"),
    ]
    assert len(set(roots)) == len(roots)


def test_a_key_depends_on_all_tokens_before_it() -> None:
    root = root_key("m", 2)
    assert page_keys(root, [1, 2, 3, 4], 2)[1] != page_keys(root, [9, 2, 3, 4], 2)[1]
    assert page_keys(root, [1, 2, 3, 4, 5], 2) == page_keys(root, [1, 2, 3, 4], 2)
    assert child_key(root, [1, 2]) != child_key(root, [2, 1])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_32_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        child_key(root_key("m", 1), [token])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_hit_never_covers_the_last_token(tokens: int, pages: int) -> None:
    assert max_hit_pages(tokens, 4) == pages
