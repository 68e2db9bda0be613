"""YAML for recipes: plain data, bounded work, and our errors only."""

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgmerge import strictyaml
from cgmerge.errors import UsageError


def loads(text):
    return strictyaml.loads_mapping(text.encode(), source="r.yml")


def test_numbers_and_words_as_everybody_means_them():
    text = (
        "a: 1e-4\nb: -.inf\nc: no\nd: ~\ne:\nf: '5'\ng: [1, 2.5, -3, +4, .5, 5.]\nh: 2020-01-01\n"
        'i: {ref: E1, weight: 1_000}\n5: 1:30\nj: 010\nk: True\nl: |\n  two\n  lines\nm: "x\\ty"\n'
    )
    assert loads(text) == {
        "a": 1e-4, "b": -float("inf"), "c": "no", "d": None, "e": None, "f": "5",
        "g": [1, 2.5, -3, 4, 0.5, 5.0], "h": "2020-01-01", "i": {"ref": "E1", "weight": "1_000"},
        "5": "1:30", "j": 10, "k": True, "l": "two\nlines\n", "m": "x\ty",
    }  # fmt: skip


LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "aliases are not read"),
        ("a: &a [*a]", "aliases are not read"),
        ("!!python/object/apply:os.system ['x']", "tags are not read"),
        ("a: !!timestamp x", "tags are not read"),
        ("a: 1\nb: 2\na: 3", "the key 'a' stands twice .line 3, column 1"),
        ("? [a]\n: b", "a key must be a plain word"),
        ("a: 1\n---\nb: 2", "a second document"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("{" * 100_000, "a key must be"),
        ("a: " + "9" * 5000, "a number of 5000 digits"),
        ("a: b: c", "mapping values are not allowed"),
        ("a: 'x", "unexpected end of stream"),
        ("a: \x00", "special characters"),
        ("- a\n- b", "must hold a mapping, found list"),
        ("", "must hold a mapping, found NoneType"),
        ("a: [" + "1," * 11_000 + "]", "more than 10,000 values"),
        ("#" * 200_000, "200,000 bytes; the limit"),
    ],
)
def test_refused_in_bounded_time(text, words):
    start = time.process_time()
    with pytest.raises(UsageError, match=words) as caught:
        loads(text)
    assert time.process_time() - start < 2
    assert caught.value.code == "usage.recipe"


def test_not_utf8():
    with pytest.raises(UsageError, match="not valid YAML"):
        strictyaml.loads_mapping(b"a: \xff", source="r.yml")


@given(st.one_of(st.binary(max_size=60), st.text("ab:-[]{}&*!?|>'\"#%@`, \n\t0.e", max_size=60)))
def test_only_our_errors_escape(data):
    with contextlib.suppress(UsageError):
        strictyaml.loads_mapping(data if isinstance(data, bytes) else data.encode(), source="r")
