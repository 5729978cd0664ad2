"""Page layouts: sizes, and refusals that name the field."""

from dataclasses import replace

import pytest

from twostroke.cluster.core.errors import LayoutMismatch
from twostroke.cluster.core.layout import PageLayout, check_compatible, gqa_layout


def layout(**changes: object) -> PageLayout:
    values: dict[str, object] = {
        "model_fingerprint": "m",
        "layers": 3,
        "kv_heads": 2,
        "head_dim": 8,
        "dtype": "float16",
        "page_size": 16,
    }
    return gqa_layout(**(values | changes))  # type: ignore[arg-type]


def test_a_page_holds_k_and_v_of_all_layers() -> None:
    assert layout().page_bytes == 3 * 2 * 2 * 16 * 8 * 2


def test_equal_layouts_are_compatible() -> None:
    check_compatible(layout(), layout())


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model_fingerprint", {"model_fingerprint": "other"}),
        ("page_size", {"page_size": 32}),
        ("rope", {"rope": "yarn"}),
        ("quantization", {"quantization": "fp8"}),
        ("groups[0].layers", {"layers": 4}),
        ("groups[0].kv_heads", {"kv_heads": 1, "head_dim": 16}),
        ("groups[0].dtype", {"dtype": "bfloat16"}),
    ],
)
def test_a_difference_is_refused_by_the_name_of_its_field(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(layout(), layout(**changes))
    assert caught.value.field == field


def test_a_second_group_is_refused_even_between_equals() -> None:
    two = replace(layout(), groups=layout().groups * 2)
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(two, two)
    assert caught.value.field == "groups"


@pytest.mark.parametrize("changes", [{"dtype": "float128"}, {"layers": 0}, {"page_size": 0}])
def test_impossible_layouts_are_value_errors(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"dtype|at least 1"):
        layout(**changes)
