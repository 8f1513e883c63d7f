"""The check of figures finds a number of a page that has no result, and a result or a setting that is on no page."""

import pytest

check_figures = pytest.importorskip("scripts.check_figures", reason="CPython 3.10 does not have tomllib")
RESULTS = {"pong": {"values": {"steps/s": 31_100, "share, %": 92.8}, "setup": [8]}, "settings": {"page.md": ["1.5 s"]}}
CELLS = {"noop-8": {"unit": "", "engines": {"bare": {"value": 2.443e6}, "gym": {"value": None}}}}
PAGE = """
<!-- measured: pong -->
With 8 envs it made 31,100 steps per second, 92.8 % of the bare loop's.

Workers have 1.5 s to end.
"""


@pytest.fixture
def find():
    return lambda page: check_figures.find_unknown({"page.md": page}, RESULTS, CELLS)


def test_a_page_whose_numbers_are_results_and_settings_is_right(find):
    assert find(PAGE) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 2.4, 3 and 7 ms slower.", ["2.4, 3 and 7 ms"]),
        ("It ran 1.1 to 1.3 times as fast, at 7.9M, or 40k.", ["1.1 to 1.3 times", "7.9M", "40k"]),
        ("Gymnasium 1.4.0 returned 84x84x4 pictures to 8 envs on 2026-11-29: `3 s`, [a](b?1%).", []),
        ("| n=8 | 5.1× | 168 % | 10.2 GB | 1,240 steps/s |", ["5.1×", "168 %", "10.2 GB", "1,240 steps/s"]),
    ],
)
def test_numbers_with_the_unit_of_a_measurement_need_a_result_or_a_setting(find, text, found):
    expected = [f"page.md:7: {each!r} is neither measured nor a setting" for each in found]
    assert find(f"{PAGE}\n{text}\n") == expected
    assert find(f"{PAGE}\n```py\n{text}\n```\n\n    {text}\n") == []


def test_a_result_that_the_page_states_otherwise_is_reported_on_both_sides(find):
    assert find(PAGE.replace("31,100", "31,200")) == [
        "page.md:2: 31200 is no result of pong",
        "measured.toml: pong: 'steps/s' is on no page",
    ]


def test_a_setting_that_the_page_does_not_have_any_more_is_reported(find):
    assert find(PAGE.replace("1.5 s", "time")) == ["measured.toml: page.md has no '1.5 s'"]


def test_results_may_be_a_cell_of_the_bench_or_a_table_between_marks(find):
    named = PAGE + "\n<!-- measured: noop-8 -->\nThe bare loop made {} steps.\n"
    assert find(named.format("2.44M")) == []
    assert find(named.format("2.5M")) == ["page.md:7: 2.5e+06 is no result of noop-8"]
    table = (
        PAGE
        + "\n<!-- ratios:begin -->\n| 5.1× |\n<!-- ratios:end -->\n\n<!-- measured: ratios -->\nIt was {} times as fast.\n"
    )
    assert find(table.format("5.1")) == []
    assert find(table.format("5.2")) == ["page.md:11: 5.2 is no result of ratios"]


def test_a_name_without_results_is_reported(find):
    assert find(PAGE + "\n<!-- measured: ping -->\n7 ms.\n") == ["page.md:7: there are no results of ping"]
