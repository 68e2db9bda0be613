"""Numbers as people type them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.plain import exact, number, whole

ODD = ["１", "1_0", "٣", " 1", "1 ", "1\n", "", ".", "e5", "0x10", "1,5", "+", "--1", "1e", "²"]


@pytest.mark.parametrize("text", ODD)
def test_what_is_no_plain_number(text):
    with pytest.raises(ValueError, match="plain"):
        number(text)
    with pytest.raises(ValueError, match="plain"):
        whole(text)


@pytest.mark.parametrize(
    ("text", "value"), [("0.2", 0.2), (".5", 0.5), ("1.", 1.0), ("-3", -3.0), ("+1e-3", 0.001)]
)
def test_numbers(text, value):
    assert number(text) == value


def test_not_finite_is_for_others_to_refuse():
    assert number("-inf") == -math.inf
    assert math.isnan(number("NaN"))


def test_whole_numbers():
    assert whole("-07") == -7
    for text in ("1.0", "1e3", "inf"):
        with pytest.raises(ValueError, match="plain"):
            whole(text)


@given(st.floats(allow_nan=False) | st.integers(-(10**30), 10**30))
def test_what_is_written_exactly_reads_back(value):
    assert number(exact(value)) == float(value)


def test_exact_tells_neighbours_apart():
    assert exact(4294967296) == "4294967296"
    assert exact(1e6) == "1000000"
    assert exact(0.95) == "0.95"
    assert exact(1e300) == "1e+300"
