"""Entries: what is written is read, and nothing else is believed."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.errors import Damaged, Incompatible, InputError, Unsafe, UsageError
from cgmerge.modules.library import entry as entries
from cgmerge.modules.library.entry import (
    MAX_BYTES,
    Entry,
    Part,
    _quick,
    check_name,
    digest_of,
    is_name,
    ordered_scores,
    own_scores,
    parse_entry,
)

HEX = "0123456789abcdef" * 4
FILES = {"b.json": Part(HEX, 7), "a.bin": Part(HEX[::-1], 0)}


def entry(**changes):
    fields = {"name": "Sort-v1", "kind": "peft", "files": FILES, "digest": digest_of(FILES)}
    return Entry(**{**fields, **changes})


def parse(data, file="sort-v1.json"):
    return parse_entry(data, file=file, source="LIB/entries/x")


def edited(**changes):
    raw = json.loads(entry().to_bytes())
    return json.dumps({**raw, **changes}).encode()


def test_the_digest_is_that_of_one_line_for_each_file():
    """As `sha256sum` would make it of a text that anybody can write."""
    lines = f"{HEX[::-1]} 0 a.bin\n{HEX} 7 b.json\n"
    assert digest_of(FILES) == hashlib.sha256(lines.encode()).hexdigest()
    assert digest_of(dict(reversed(FILES.items()))) == digest_of(FILES)


def test_size_is_that_of_all_files():
    assert entry().size == 7
    assert entry().facts()["size_bytes"] == 7


texts = st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=30)


@given(
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(is_name),
    st.sampled_from(["peft", "cge", "full"]),
    st.dictionaries(
        st.from_regex(r"[a-z0-9][a-z0-9._-]{0,9}", fullmatch=True),
        st.builds(Part, st.just(HEX), st.integers(0, 2**50)),
        min_size=1,
        max_size=4,
    ),
    st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9)),
    st.lists(texts, max_size=3).map(tuple),
    texts,
)
def test_what_is_written_is_read(name, kind, files, scores, tags, text):
    written = Entry(
        name=name,
        kind=kind,
        files=files,
        digest=digest_of(files),
        expert=HEX,
        base=text,
        base_fingerprint=text,
        skill=text,
        parameters=5,
        rank=3,
        scores=scores,
        license="mit",
        tags=tags,
    )
    assert parse(written.to_bytes(), written.file_name) == written


TRAINED = {  # as `train --eval-data` leaves them, and as a file holds them: by their names
    "eval.base_exact_match": 0.0,
    "eval.base_loss": 3.632,
    "eval.exact_match": 0.675,
    "eval.loss": 0.222,
    "eval.n": 40,
    "first_loss": 4.846,
    "loss": 0.25,
}


def test_scores_of_the_expert_come_first_and_the_base_s_are_not_its_own():
    own = ["eval.exact_match", "eval.loss", "loss"]
    assert [name for name, _ in own_scores(TRAINED)] == own
    rest = ["eval.base_exact_match", "eval.base_loss", "eval.n", "first_loss"]
    assert [name for name, _ in ordered_scores(TRAINED)] == own + rest
    assert own_scores({"first_loss": 4.8, "loss": 0.1}) == [("loss", 0.1)]
    assert own_scores({"loss": 0.1, "b.kl": 2, "a.exact_match": 0.5, "eval.accuracy": 0.9}) == [
        ("a.exact_match", 0.5), ("eval.accuracy", 0.9), ("b.kl", 2), ("loss", 0.1),
    ]  # fmt: skip
    assert own_scores({"base_line.exact_match": 0.5}) == [("base_line.exact_match", 0.5)]


@given(st.dictionaries(st.sampled_from([*TRAINED, "x", "y.n", "y.base_z"]) | texts, st.floats()))
def test_no_score_is_lost_in_ordering(scores):
    assert sorted(map(str, ordered_scores(scores))) == sorted(map(str, scores.items()))
    assert ordered_scores(scores)[: len(own_scores(scores))] == own_scores(scores)
    assert not [name for name, _ in own_scores(scores) if name.split(".")[-1].startswith("base_")]


def test_unknown_fields_of_later_versions_are_left_alone():
    assert parse(edited(later={"x": 1})) == entry()


@pytest.mark.parametrize(
    "name",
    ["a", "A", "0", "_x", "sort-v1.2", "x" * 100, "entries2", "conx", "com10"],
)
def test_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "a/b", "a\\b", ".hidden", "-dash", "x" * 101, "a b", "ä", "a\n",
        "a\0", "con", "CON.txt", "com1", "nul", "a.", "entries", "Objects", "removing", "a:b", "~",
    ],
)  # fmt: skip
def test_names_that_no_system_should_get(name):
    with pytest.raises(UsageError) as caught:
        check_name(name)
    assert "--name" in caught.value.hint
    raw = json.dumps({**json.loads(entry().to_bytes()), "name": name}).encode()
    with pytest.raises(Unsafe):
        parse(raw, name.lower() + ".json")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"name": 5},
        {"files": {"../x": [HEX, 1]}},
        {"files": {"/etc/passwd": [HEX, 1]}},
        {"files": {"a/b": [HEX, 1]}},
        {"files": {".hidden": [HEX, 1]}},
        {"files": {"nul\0": [HEX, 1]}},
    ],
)
def test_names_in_an_entry_lead_nowhere(changes):
    with pytest.raises(Unsafe) as caught:
        parse(edited(**changes))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {}},
        {"files": []},
        {"files": {str(n): [HEX, 1] for n in range(65)}},
        {"files": {"a": HEX}},
        {"files": {"a": [HEX]}},
        {"files": {"a": [HEX[1:], 1]}},
        {"files": {"a": [HEX.upper(), 1]}},
        {"files": {"a": [HEX, -1]}},
        {"files": {"a": [HEX, 2**53]}},
        {"files": {"a": [HEX, True]}},
        {"files": {"a": [HEX, 1.0]}},
        {"files": {"a.bin": [HEX, 0], "b.json": [HEX, 7]}},  # another digest than stated
        {"digest": "0" * 64},
        {"digest": None},
        {"kind": "pickle"},
        {"kind": ["peft"]},
        {"expert": "x"},
        {"base": "two\nlines"},
        {"base": "\x1b[31m"},
        {"skill": "x" * 1001},
        {"rank": "4"},
        {"parameters": -1},
        {"scores": {"a": "1"}},
        {"scores": {"a": True}},
        {"scores": []},
        {"tags": "x"},
        {"tags": ["x"] * 101},
        {"license": 3},
    ],
)
def test_wrong_fields_are_damage(changes):
    with pytest.raises(Damaged) as caught:
        parse(edited(**changes))
    assert "LIB/entries/x" in caught.value.message


def test_other_schemas():
    for schema in (None, 1, "cgmerge.entry/2"):
        with pytest.raises(Incompatible, match="cgmerge.entry/1"):
            parse(edited(schema=schema))


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b"\xff", b'{"schema":NaN}', b"[" * 5000, b" " * (MAX_BYTES + 1)],
)
def test_other_files(data):
    with pytest.raises(InputError):
        parse(data)


def test_every_truncation_and_every_flipped_bit_of_what_decides():
    """Whatever the damage, either an error of ours or an entry of the same files."""
    data = entry().to_bytes()
    for size in range(len(data) - 1):  # the last byte is a line end
        with pytest.raises(InputError):
            parse(data[:size])
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << (place % 8)
        try:
            found = parse(bytes(flipped))
        except InputError:
            continue
        assert digest_of(found.files) == found.digest == entry().digest


def test_other_ways_to_write_the_same():
    """Spaces, another order and escapes are read as what is written here is."""
    written = entry(skill="sort ä", scores={"a": 0.5, "b": -3}, tags=("x",))
    raw = json.loads(written.to_bytes())
    for text in (
        json.dumps(raw),
        json.dumps(raw, indent=1),
        json.dumps(dict(reversed(raw.items()))),
    ):
        assert parse(text.encode()) == written


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"skill":', b'"skill":"a","skill":'),
        (b'"scores":{', b'"scores":{"a":1,"a":2'),
        (b'"files":{', f'"files":{{"b.json":["{HEX}",7],'.encode()),
        (b'"rank":null', b'"rank":1e3'),
        (b'"skill":""', '"skill":"a\u2028b"'.encode()),
    ],
)
def test_what_only_looks_as_written_here(old, new):
    data = entry().to_bytes()
    assert data.count(old) == 1
    with pytest.raises(InputError):
        parse(data.replace(old, new))


ODD = st.sampled_from([*'"\\,:{}[]0e.-9 \t\n\x7f\x1f\u2028äa', "", '"x":1,', '"rank":3,', "null"])


@given(place=st.integers(0, 10_000), cut=st.integers(0, 2), new=ODD, tags=st.booleans())
def test_the_quick_way_reads_what_the_long_way_reads(place, cut, new, tags):
    """Whatever is done to a file: the same entry, or the same refusal."""
    scores = {"exact_match": 0.5, "loglik": -1e-05, "n": 3} if tags else {}
    good = entry(scores=scores, tags=("x", "ü") if tags else (), base="b", rank=3, skill="s")
    text = good.to_bytes().decode()
    place %= len(text)
    data = (text[:place] + new + text[place + cut :]).encode()
    found = []
    for quick in (_quick, lambda _: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entries, "_quick", quick)
            try:
                found.append(parse(data))
            except InputError as error:
                found.append(error.code)
    assert found[0] == found[1]


def test_what_is_written_is_read_the_quick_way():
    good = entry(scores={"exact_match": 0.5}, tags=("x", "ü"), rank=3, base_fingerprint="f")
    assert _quick(good.to_bytes()) == good
    assert _quick(entry().to_bytes()) == entry()
    assert _quick(good.to_bytes() + b" ") is None
    assert _quick(good.to_bytes().replace(b'"skill":""', b'"skill":"\xc2\x85"')) is None
