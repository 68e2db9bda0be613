"""JSON from strangers: refused in bounded time, with our own errors."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgmerge import strictjson
from cgmerge.errors import CgmergeError, Damaged, LimitExceeded


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b'{"x": {"b": 1, "c": 2, "b": 3}}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 9223372036854775808}',
        b'{"a": "\\ud800"}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\xff"}',
        b'{"a": 1',
        b"",
        b"{'a': 1}",
        b'{"a": 1} trailing',
    ],
)
@pytest.mark.fault("F07")
def test_refused_as_damaged(text):
    with pytest.raises(Damaged, match="thing"):
        strictjson.loads(text, source="thing")


@pytest.mark.fault("F07")
def test_depth_and_size_are_limits():
    with pytest.raises(LimitExceeded, match="too deeply"):
        strictjson.loads(b"[" * 100_000 + b"]" * 100_000, source="deep")
    with pytest.raises(LimitExceeded, match="limit is 10"):
        strictjson.loads(b"[1,2,3,4,5,6,7]", source="long", max_bytes=10)


def test_top_level_object():
    assert strictjson.loads_object(b'{"a": [1, 2.5, null, true]}', source="x")["a"][1] == 2.5
    with pytest.raises(Damaged, match="found an array"):
        strictjson.loads_object(b"[]", source="x")


def test_dumps_is_canonical():
    assert strictjson.dumps({"b": 1, "a": "λ"}) == '{\n  "a": "λ",\n  "b": 1\n}\n'.encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(json_values)
def test_what_is_written_is_read(value):
    assert strictjson.loads(strictjson.dumps(value), source="x") == value


@given(st.binary(max_size=200))
@pytest.mark.fault("F07")
def test_only_our_errors_escape(data):
    with contextlib.suppress(CgmergeError):
        strictjson.loads(data, source="x")


def test_canonical_form():
    value = {"b": [1, 2.5, None], "a": {"é": True}}
    assert strictjson.canonical(value) == '{"a":{"é":true},"b":[1,2.5,null]}'.encode()
    with pytest.raises(ValueError):
        strictjson.canonical({"a": float("nan")})


@pytest.mark.parametrize(
    ("value", "depth"),
    [(1, 0), ("[[", 0), ([], 1), ({}, 1), ([[]], 2), ({"a": [{"b": 1}]}, 3), ([1, [2, [3]], 4], 3)],
)
def test_depth(value, depth):
    assert strictjson.depth(value) == depth
