"""What tells the groups of a figure apart, and which values are far enough from the others to squash a plot."""

import re
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdpfed.report.look import COLORS, DASHES, LEAST_POINTS, MARKERS, SQUASHED, ceiling, floor, looks

names = st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"])
groups = st.lists(st.tuples(st.sampled_from(["digits", "mnist"]), names), min_size=1, max_size=MARKERS * DASHES)
numbers = st.floats(0, 100, allow_subnormal=False)


@given(groups)
def test_a_method_has_one_color_and_no_other_method_has_it(given_: list[tuple[str, str]]) -> None:
    found = looks(given_)
    colors = {(method, look.color) for (_, method), look in zip(given_, found, strict=True)}
    assert len(colors) == len({method for method, _ in colors}) == len({color for _, color in colors})


@given(groups)
def test_no_two_groups_of_a_data_set_differ_by_color_alone(given_: list[tuple[str, str]]) -> None:
    marks = [(dataset, one.marker, one.dash) for (dataset, _), one in zip(given_, looks(given_), strict=True)]
    assert len(set(marks)) == len(marks)


def test_the_page_has_the_colors_of_the_figures_and_as_many_in_the_dark() -> None:
    css = resources.files("tdpfed.report").joinpath("page.css").read_text()
    light, dark = (dict(re.findall(r"--c(\d+): (#\w+)", css.split("}")[n])) for n in (0, 1))
    assert list(light.values()) == list(COLORS)
    assert dark.keys() == light.keys()
    assert len(set(COLORS)) == len(set(dark.values())) == len(COLORS)


def test_groups_beyond_the_number_of_looks_still_have_one() -> None:
    assert len(looks([("digits", str(n)) for n in range(50)])) == 50


@given(st.lists(st.lists(numbers, min_size=1), min_size=1))
def test_what_is_cut_off_is_little_and_far(curves: list[list[float]]) -> None:
    shown = ceiling(curves)
    if shown is None:
        return
    low, high = shown
    assert low == min(map(min, curves))
    assert max(map(max, curves)) > high
    cut = [curve for curve in curves if sum(value > high for value in curve) > len(curve) / 20 or curve[0] > high]
    assert len(cut) <= max(len(curves) // 3, len(curves) > 1)


@given(st.lists(numbers, min_size=1))
def test_accuracies_that_are_close_are_all_shown(finals: list[float]) -> None:
    lowest = floor(finals)
    if max(finals) - min(finals) <= SQUASHED * LEAST_POINTS:
        assert lowest is None
    if lowest is not None:
        assert lowest in finals
        assert sum(one < lowest for one in finals) <= max(len(finals) // 3, 1)


CONVERGING = [[2.3, 1.0, 0.5], [2.4, 1.2, 0.6], [2.2, 0.9, 0.4]]


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        (CONVERGING, None),
        ([*CONVERGING, [2.3, 1e3, 1e6]], (0.4, 2.4)),
        ([*CONVERGING, *CONVERGING, [2.3, 40.0, 700.0], [2.3, 1e3, 1e6]], (0.4, 2.4)),
        ([[0.1, 0.2], [5.0, 1e6]], (0.1, 0.2)),  # of two, the lower one is shown
        ([[1.0, 10.0, 100.0, 1000.0]], None),  # alone: nothing to compare with
        ([[2.3, *20 * [1.0], 1e6, *20 * [0.5]]], (0.5, 2.3)),  # one value of forty-two
        ([[1.0, 1.0], [1.0, 1.0], [1.0, 50.0]], None),  # without a height there is nothing to squash
        ([], None),
        ([[], [1.0]], None),
    ],
)
def test_a_diverging_curve_leaves_room_for_the_others(
    curves: list[list[float]], expected: tuple[float, float] | None
) -> None:
    assert ceiling(curves) == expected


@pytest.mark.parametrize(
    ("finals", "expected"),
    [
        ([95.4, 95.1, 94.9, 93.1, 71.3], None),
        ([95.4, 95.1, 94.9, 93.1, 71.3, 12.0], 71.3),
        ([95.0, 95.0, 10.0], 95.0),
        ([95.0, 60.0], 95.0),
        ([95.0], None),
        ([], None),
    ],
)
def test_a_method_that_failed_leaves_room_for_the_others(finals: list[float], expected: float | None) -> None:
    assert floor(finals) == expected
