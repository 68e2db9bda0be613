"""Suites by name: what they make, from where, and what they refuse; modular arithmetic; readers."""

import gzip
import json
from collections import Counter
from itertools import product

import public_data
import pytest

from cgmerge.errors import Damaged, DataError, NotFound, UsageError
from cgmerge.evals.tasks import arithmetic, chains
from cgmerge.evals.tasks.parts import carve, shrink, write_parts
from cgmerge.evals.tasks.suites import SUITES, Wanted, find_suite, make_parts

GENERATED = [(s.name, split) for s in SUITES.values() if not s.reads for split in s.splits]


def make(suite, split, **wanted):
    return make_parts(find_suite(suite), Wanted(split, **wanted))


@pytest.mark.parametrize(("suite", "split"), GENERATED)
def test_every_suite_makes_rows_of_its_size_and_shares_no_prompt(suite, split):
    if suite == "scan" and split.startswith("few") and split != "few-shot-32":
        pytest.skip("one of eleven")
    parts = make(suite, split, count=400, seed=3)
    rows = dict(parts.items())
    assert all(rows.values())
    if split not in (
        "localism", "substitutivity-equal", "substitutivity-primitive", "overgeneralisation"
    ):  # fmt: skip
        assert 360 <= sum(map(len, rows.values())) <= 401
    prompts = {name: {row["prompt"] for row in part} for name, part in rows.items()}
    for one, other in (("train", "validation"), ("validation", "test"), ("train", "test")):
        shared = prompts[one] & prompts[other]
        assert split in ("localism", "overgeneralisation") or not shared
    assert all(isinstance(r[c], str) and r[c] for part in rows.values() for r in part
               for c in ("prompt", "completion"))  # fmt: skip
    assert make(suite, split, count=400, seed=3) == parts
    if not split.startswith(("addprim", "length", "template", "filler", "single")):
        assert make(suite, split, count=400, seed=4) != parts


def test_scan_without_validation_is_as_published_and_with_it_the_union_is():
    whole, carved = (make("scan", "addprim-jump", share=share) for share in (0.0, 0.1))
    assert (len(whole.train), len(whole.validation), len(whole.test)) == (14670, 0, 7706)
    assert len(carved.validation) == 1467
    together = Counter(r["prompt"] for r in [*carved.train, *carved.validation])
    assert together == Counter(r["prompt"] for r in whole.train)
    assert "IN: jump OUT:" not in {r["prompt"] for r in carved.validation}


def test_arithmetic_by_brute_force():
    p = 5
    parts = arithmetic.make("iid", Wanted("iid").rng("x"), 300, p)
    for row in [*parts.train, *parts.validation, *parts.test]:
        (a, b), (x, y) = (map(int, row[c].split(",")) for c in ("task", "input"))
        assert row["prompt"] == f"{a} * {x} + {b} * {y} mod {p} ="
        assert int(row["completion"]) == (a * x + b * y) % p
    assert [len(rows) for _, rows in parts.items()] == [216, 24, 60]


@pytest.mark.parametrize("split", ["tasks", "inputs", "both"])
def test_arithmetic_holds_out_tasks_or_inputs(split):
    parts = make("arithmetic", split, modulus=7, count=400)
    learned = [*parts.train, *parts.validation]
    for column, name in (("task", "tasks"), ("input", "inputs")):
        known, asked = ({row[column] for row in rows} for rows in (learned, parts.test))
        assert (not known & asked) == (split in (name, "both"))


def test_all_rows_of_a_small_modulus_can_be_had():
    parts = make("arithmetic", "iid", modulus=3, count=81)
    got = {(row["task"], row["input"]) for _, rows in parts.items() for row in rows}
    assert got == {(f"{a},{b}", f"{x},{y}") for a, b, x, y in product(range(3), repeat=4)}
    with pytest.raises(UsageError, match="82 rows are wanted, there are 81"):
        make("arithmetic", "iid", modulus=3, count=82)


def test_the_grid_keeps_every_cell_off_the_diagonal_for_the_test():
    experts = {skill: make("grid", skill, seed=5) for skill in chains.NEW}
    unseen = make("grid", "unseen", seed=5)
    own = {skill: {row["skill"] for row in parts.test} for skill, parts in experts.items()}
    assert all(len(cells) == 1 for cells in own.values())
    alphabets = {skill: next(iter(cells)).split("-")[1] for skill, cells in own.items()}
    assert sorted("".join(alphabets.values())) == sorted(chains.LETTERS)
    assert {row["skill"] for row in unseen.test} == {
        f"{skill}-{other}" for skill, mine in alphabets.items()
        for other in alphabets.values() if other != mine
    }  # fmt: skip
    for skill, parts in experts.items():
        assert {row["skill"] for row in parts.validation} == own[skill]
        shown = [row for row in parts.train if row["skill"] == next(iter(own[skill]))]
        replayed = [row for row in parts.train if set(row["skill"].split()) <= set(chains.BASE)]
        assert len(shown) + len(replayed) == len(parts.train)
        assert len(replayed) / len(parts.train) == pytest.approx(0.4, abs=0.002)
        # 3 letters, lists of 3 to 5: 27 + 81 + 243, each in one split for ever.
        assert len(shown) + len(parts.validation) + len(parts.test) == 351
    row = unseen.test[0]
    names, letters = row["prompt"].removesuffix(" =").split(" : ")
    assert row["completion"].split() == chains.apply([names], letters.split())


def test_chains_and_domains_hold_out_what_no_expert_saw():
    parts = make("chains", "pairs", count=600)
    new = set(chains.NEW)
    assert all(set(r["skill"].split()) <= new and " " in r["skill"] for r in parts.test)
    assert not any(len(set(r["skill"].split()) & new) > 1 for r in parts.train)
    assert {r["skill"] for r in make("chains", "rotr", count=200).test} == {"rotr"}
    mixed = make("domains", "mixed")
    assert all("+" in r["skill"] for r in mixed.test)
    assert not any("+" in r["skill"] for r in mixed.train)
    single = make("domains", "single")
    assert sum(len(rows) for _, rows in single.items()) == 4 * (27 + 81 + 243)


@pytest.mark.parametrize(
    ("suite", "wanted", "message"),
    [
        ("scan", {"split": "lenght"}, "no split 'lenght'"),
        ("cogs", {"split": "test"}, "read from its published files"),
        ("scan", {"split": "simple", "folder": "x"}, "reads no folder"),
        ("scan", {"split": "simple", "modulus": 7}, "no modulus"),
        ("scan", {"split": "simple", "count": 10**6}, "there are 20,910"),
        ("chains", {"split": "rotr", "count": 10**6}, "at most 100,000"),
    ],
)
def test_what_is_refused(suite, wanted, message):
    with pytest.raises(UsageError, match=message):
        make(suite, **wanted)


def test_a_slip_of_a_name_is_suggested():
    with pytest.raises(UsageError) as caught:
        find_suite("pfcg")
    assert "pcfg" in caught.value.hint


def test_carve_never_takes_a_repeated_row():
    rows = [{"prompt": name} for name in "aabcdefghi"]
    kept, taken = carve(rows, 0.5, Wanted("x").rng("y"))
    assert len(taken) == 5
    assert kept.count({"prompt": "a"}) == 2
    assert carve(rows, 0.0, Wanted("x").rng("y"))[1] == []


def test_shrink_keeps_proportions_and_order():
    parts = make("scan", "length")
    small = shrink(parts, 209, Wanted("x").rng("n"))
    assert [len(rows) for _, rows in small.items()] == [153, 17, 39]
    places = [parts.test.index(row) for row in small.test]
    assert places == sorted(places)


def test_a_card_has_counts_and_digests_and_bytes_repeat(tmp_path):
    rows = {"train": [{"prompt": "ä", "completion": "b"}], "validation": [], "test": [{"x": 1}]}
    cards = [write_parts(tmp_path / n, rows, {"seed": 1}, overwrite=False) for n in "ab"]
    assert cards[0] == cards[1]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "card.json", "test.jsonl", "train.jsonl"]  # fmt: skip
    assert json.loads((tmp_path / "a" / "card.json").read_text()) == cards[0]
    assert cards[0]["parts"]["train"]["rows"] == 1
    content = (tmp_path / "a" / "train.jsonl").read_text("utf-8")
    assert content == '{"prompt": "ä", "completion": "b"}\n'
    with pytest.raises(DataError, match="test, row 1"):
        write_parts(tmp_path / "c", {"test": [{"x": float("nan")}]}, {}, overwrite=False)
    assert not (tmp_path / "c").exists()


def write_cogs(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.tsv").write_text("".join("\t".join(r) + "\n" for r in rows))


def test_cogs_files(tmp_path):
    row = ("A cat ran .", "cat ( x _ 1 ) AND run", "in_distribution")
    write_cogs(tmp_path / "d", train=[row, row], dev=[row], test=[row])
    parts = make("cogs", "test", folder=tmp_path / "d")
    assert parts.test == [{"prompt": "A cat ran .\n", "completion": row[1],
                           "sentence": row[0], "skill": row[2]}]  # fmt: skip
    assert len(parts.train) == 2
    with pytest.raises(NotFound, match=r"no gen.tsv or gen.tsv.gz; found dev.tsv, test.tsv"):
        make("cogs", "gen", folder=tmp_path / "d")
    write_cogs(tmp_path / "d", test=[row[:2]])
    with pytest.raises(Damaged, match=r"test.tsv, line 1: 2 columns"):
        make("cogs", "test", folder=tmp_path / "d")
    (tmp_path / "d" / "gen.tsv.gz").write_bytes(b"no gzip")
    with pytest.raises(Damaged, match="no gzip file"):
        make("slog", "gen", folder=tmp_path / "d")


def bbh(folder, name, targets):
    folder.mkdir(exist_ok=True)
    examples = [{"input": f"q{n} {{}}", "target": t} for n, t in enumerate(targets)]
    (folder / f"{name}.json").write_text(json.dumps({"canary": "C-GUID", "examples": examples}))


def test_bbh_files_are_for_evaluation_and_keep_their_canary_out_of_rows(tmp_path):
    bbh(tmp_path / "b", "letters", ["(A)"] * 8 + ["stray"])
    bbh(tmp_path / "b", "words", ["yes", "no "])
    parts = make("bbh", "test", folder=tmp_path / "b")
    assert parts.train == []
    counts = Counter(r["skill"] for r in parts.validation), Counter(r["skill"] for r in parts.test)
    assert counts == ({"letters": 5, "words": 1}, {"letters": 4, "words": 1})
    assert parts.notes[1:] == ("C-GUID", "letters: 1 targets are no option letter: stray")
    rows = [*parts.validation, *parts.test]
    assert "C-GUID" not in json.dumps(rows)
    assert {r["completion"] for r in rows if r["skill"] == "words"} == {" yes", " no"}
    assert any(r["prompt"] == "Q: q0 {}\nA:" for r in rows)
    again = make("bbh", "test", folder=tmp_path / "b", seed=9)
    assert again.validation == parts.validation  # which rows are shown depends on no run


def test_bigbench_files(tmp_path):
    task = {"name": "t", "task_prefix": "Do it. ", "example_input_prefix": "In {x}: ",
            "example_output_prefix": "\nOut: ", "examples": [
                {"input": "1", "target": ["a", "b"]},
                {"input": "2", "target_scores": {"x": 0, "y": 1}},
                {"input": "3", "target": "z"}]}  # fmt: skip
    (tmp_path / "j").mkdir()
    with gzip.open(tmp_path / "j" / "t.jsonl.gz", "wt") as file:
        file.write(json.dumps(task) + "\n")
    parts = make("bigbench", "test", folder=tmp_path / "j")
    rows = sorted([*parts.validation, *parts.test], key=lambda r: r["prompt"])
    assert [r["completion"] for r in rows] == [" a", " y", " z"]
    assert rows[0]["prompt"] == "Do it. In {x}: 1\nOut:"
    task["examples"].append({"input": "4"})
    (tmp_path / "j" / "t.json").write_text(json.dumps(task))
    with pytest.raises(DataError, match="example 4: an input and a target are wanted"):
        make("bigbench", "test", folder=tmp_path / "j")


@pytest.mark.parametrize("suite", ["bbh", "bigbench"])
def test_folders_without_tasks_are_named(tmp_path, suite):
    with pytest.raises(NotFound, match="no such folder"):
        make(suite, "test", folder=tmp_path / "none")
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="no task with examples"):
        make(suite, "test", folder=tmp_path)


def test_published_folders_have_their_published_sizes():
    sizes = {
        "cogs": (24155, 3000, 3000),
        "slog": (32755, 4046, 4046),
    }
    for suite, wanted in sizes.items():
        parts = make(suite, "test", folder=public_data.folder(suite))
        assert tuple(len(rows) for _, rows in parts.items()) == wanted
    parts = make("bbh", "test", folder=public_data.folder("bbh"))
    skills = Counter(row["skill"] for row in [*parts.validation, *parts.test])
    assert len(skills) == 19
    assert (skills["causal_judgement"], skills["navigate"], skills["snarks"]) == (187, 250, 178)
    assert {n.split(":")[0] for n in parts.notes[2:]} == {"movie_recommendation", "ruin_names"}
    parts = make("bigbench", "test", folder=public_data.folder("bigbench"))
    rows = [*parts.validation, *parts.test]
    names = {row["skill"] for row in rows}
    assert sum(name.startswith("list_functions/") for name in names) == 200
    assert "BENCHMARK DATA" not in json.dumps(rows)
