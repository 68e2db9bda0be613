"""The report: joined records, what it says in words, and a page that trusts no name."""

import re
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_support import make_evaluation, write
from report_support import DEMO, KINDS, RIGHT, WRONG, Page, page_of, sections_of

from cgmerge.errors import UsageError
from cgmerge.evals.report.files import (
    Curve,
    Files,
    Point,
    Tuned,
)
from cgmerge.evals.report.labels import label, labels
from cgmerge.evals.report.markdown import plain, render_markdown
from cgmerge.evals.report.page import Report
from cgmerge.evals.report.sections import make_sections, open_source, significant
from cgmerge.evals.report.tables import _step, signed
from cgmerge.evals.report.words import say
from cgmerge.evals.stats import holm, mcnemar, wilson

NASTY = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "a\u202eb\u2066c",
    "](http://evil) | `x` \n# h",
    "x" * 10_000,
    "&amp;<!-- ]]> </style></title>",
]


@pytest.fixture(scope="module")
def demo():
    return make_evaluation(DEMO, kinds=KINDS)


def test_comparisons_by_hand(demo):
    (section,) = sections_of(demo)
    assert (section.top.name, section.top.mean.score) == ("ties", pytest.approx(0.7))
    assert section.experts == {"copy": "copy", "sort": "sort", "old": "copy", None: "copy"}
    old = section.base["ties", "old"]
    assert (old.wins, old.losses, old.difference) == (0, 8, pytest.approx(-0.8))
    # Nine cells against the base: four differ, by 10, 10, 10, 9 and 8 items.
    p = {(n, s): one.p for (n, s), one in section.base.items() if s is not None}
    assert sorted(p.values())[:5] == [mcnemar(10, 0)] * 3 + [mcnemar(9, 0), mcnemar(8, 0)]
    assert [section.base[key].p_holm for key in p] == holm(list(p.values()))
    assert old.p_holm == pytest.approx(5 * 2 / 256)
    lost = section.expert["ties", "sort"]
    assert (lost.wins, lost.losses, lost.p_holm) == (0, 1, 1.0)
    assert ("copy", "sort") not in section.expert  # an expert is not a merge
    assert section.others["base"].p == mcnemar(8, 19)


def test_where_no_expert_is_better_the_report_says_so(demo):
    """Both are right on all of `old`; which of them stands there is then nobody's merit."""
    report = Report("T", sections_of(demo))
    said = {
        "copy": "copy",
        "sort": "sort",
        "old": "copy; no expert is better",
        "mean": "copy; no expert is better",
    }
    found = re.findall(r"(?m)^\| (\w+) \(against ([^)]+)\) ", render_markdown(report))
    assert dict(found) == said
    assert "<small>against <bdi>copy; no expert is better</bdi></small>" in page_of(demo)
    alone = {name: rows for name, rows in DEMO.items() if name != "sort"}
    text = render_markdown(Report("T", sections_of(make_evaluation(alone, kinds=KINDS))))
    assert "(against copy)" in text
    assert "no expert is better" not in text


def test_groups_are_guessed_from_the_experts_or_named(demo):
    (section,) = sections_of(demo)
    assert [group.skills for group in section.groups] == [("copy", "sort"), ("old",)]
    assert section.groups[0].guessed
    pooled = section.shares(section.groups[0])["ties"]
    assert (pooled.correct, pooled.n, pooled.low) == (19, 20, wilson(19, 20).low)
    (named,) = sections_of(demo, groups={"all": ["copy", "sort", "old"]})
    assert [(one.name, one.guessed) for one in named.groups] == [("all", False)]
    with pytest.raises(UsageError, match="no record has a skill 'sotr'") as error:
        sections_of(demo, groups={"g": ["sotr"]})
    assert "did you mean sort?" in error.value.hint
    (plain_,) = sections_of(make_evaluation({"base": {"x": "1"}}))
    assert plain_.groups == ()


def test_words_name_what_is_best_and_what_was_lost(demo):
    text = " ".join(say(sections_of(demo)[0]))
    assert "4 models were scored on 30 items of 3 skills" in text
    assert "Best overall is ties with a mean of 0.70 (95 % interval" in text
    # Pooled 19 : 8 against the base is not sure; nor is what is measured against the experts.
    assert "do not decide which model is best: base (p = 0.157)" in text
    assert "significantly better on 2 of 3 skills, and significantly worse on old" in text
    assert "old (1.00 to 0.20, p = 0.039)" in text
    assert "significantly worse than the best single expert on old (0.80 lower than copy)" in text
    assert "picked on these very items" in text


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"base": "0000000000", "a": RIGHT}, "Every other model is significantly lower"),
        ({"base": "0000000000", "a": RIGHT}, "and lost nothing on any."),
        ({"base": RIGHT, "a": WRONG}, "Best overall is base"),
        ({"base": RIGHT, "a": WRONG}, "No model has a better mean than the base."),
        ({"base": RIGHT, "a": RIGHT}, "base and a share the best mean, 1.00"),
        ({"base": RIGHT, "a": RIGHT}, "These items do not decide which of them is best."),
        (
            {"base": WRONG, "a": RIGHT, "b": "1111111110"},
            "Not significantly lower: b (p = 1.000); all the others are (exact McNemar",
        ),
        ({"a": RIGHT}, "There is nothing to compare it with."),
    ],
)
def test_words_for_every_outcome(answers, says):
    evaluation = make_evaluation({name: {"s": row} for name, row in answers.items()})
    assert says in " ".join(say(sections_of(evaluation)[0]))


def test_a_loss_that_may_be_chance_is_called_that():
    rows = {"base": {"a": WRONG, "b": "1000000000"}, "m": {"a": RIGHT, "b": WRONG}}
    text = " ".join(say(sections_of(make_evaluation(rows))[0]))
    assert "what it lost may be chance: b (0.10 to 0.00, p = 1.000)" in text


def test_significance_needs_test_and_difference_to_agree(demo):
    (section,) = sections_of(demo)
    one = section.base["ties", "copy"]
    assert significant(one) == 1
    assert significant(replace(one, wins=0, losses=10, difference=-1.0)) == -1
    assert significant(replace(one, difference=-0.1)) == 0
    assert significant(replace(one, p_holm=0.05)) == 0


def test_records_of_the_same_items_are_joined(demo):
    other = {"base": DEMO["base"], "ties": {"copy": RIGHT, "sort": RIGHT, "old": RIGHT}}
    (section,) = sections_of(demo, make_evaluation(other, order=[9, 1, 2, 3, 4, 5, 6, 7, 8, 0]))
    names = [column.name for column in section.columns]
    assert names == ["base", "copy", "sort", "ties", "ties (r1)"]  # one base, two different ties
    assert section.column("ties (r1)").base == "base"
    assert section.top.name == "ties (r1)"
    assert section.base["ties (r1)", "copy"].wins == 10
    text = page_of(demo, make_evaluation(other))
    assert "Part 2" not in text
    (twice,) = sections_of(demo, demo)
    assert len(twice.columns) == 4  # the same record again adds nothing


def test_bases_of_joined_records_stay_apart(demo):
    other = make_evaluation({"base": DEMO["ties"], "new": DEMO["ties"]}, base="fp1:11")
    (section,) = sections_of(demo, other)
    assert [column.name for column in section.columns][-2:] == ["base (r1)", "new"]
    assert section.column("new").base == "base (r1)"
    assert section.base["new", None].difference == 0.0
    assert ("base (r1)", None) not in section.base


def test_records_of_other_items_are_parts(demo):
    parts = sections_of(demo, make_evaluation({"base": {"copy": "10"}}))
    assert len(parts) == 2
    assert len(sections_of(demo, make_evaluation(DEMO, kinds=KINDS, metric="loglik"))) == 2
    text = page_of(demo, make_evaluation({"base": {"copy": "10"}}))
    assert text.index("Part 1") < text.index("Part 2")
    with pytest.raises(UsageError, match="cannot be joined"):
        sections_of(
            demo, make_evaluation({"base": {"new": "10"}}), groups={"both": ["copy", "new"]}
        )


TAGS = """html head meta title style body header main footer section h1 h2 h3 p div table caption
    thead tbody tr th td b i bdi span small code strong figure figcaption svg line circle text
    polyline"""
ATTRIBUTES = """lang charset http-equiv content name class role tabindex aria-label aria-hidden
    scope viewbox x y x1 x2 y1 y2 cx cy r points text-anchor transform stroke-dasharray"""


def hostile():
    names = [*NASTY, "base"]
    answers = {name: dict.fromkeys(NASTY, "1010") for name in names}
    evaluation = make_evaluation(answers, kinds={NASTY[0]: "expert"}, sha="<i>")
    record = replace(
        evaluation.record,
        warnings=tuple(NASTY),
        versions={"<b>": "<i>"},
        base=replace(evaluation.record.base, name=NASTY[1], fingerprint=NASTY[0]),
        targets=tuple(replace(one, digest=NASTY[1]) for one in evaluation.record.targets),
    )
    known = {
        NASTY[0]: Files(
            3, NASTY[1], Tuned(((NASTY[0], NASTY[1]),), (Curve(NASTY[0], (Point(1, 2),)),), 1.0)
        ),
    }
    return replace(evaluation, record=record), known


def test_no_name_becomes_markup():
    evaluation, known = hostile()
    groups = {NASTY[0]: [NASTY[1]], NASTY[4]: [NASTY[0]]}
    text = page_of(evaluation, groups=groups, title=NASTY[0], known=known)
    page = Page(text)
    assert page.tags <= set(TAGS.split())
    assert {name for _, name, _ in page.attributes} <= set(ATTRIBUTES.split())
    assert "<script" not in text
    assert "\u202e" not in text
    assert "\u2066" not in text
    assert "x" * 500 not in text
    assert NASTY[0] in "".join(page.text)  # shown as it is written
    for _, name, value in page.attributes:
        if name == "class":
            assert re.fullmatch(r"[a-z0-9 ]+", value), value


def test_markdown_takes_no_name_for_markup():
    evaluation, known = hostile()
    text = render_markdown(Report(NASTY[3], sections_of(evaluation), known))
    assert "<" not in text
    assert "\u202e" not in text
    assert not re.search(r"(?<!\\)\](?!\\)\(", text)
    assert "http\\://evil" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    # Two groups, three effects, five merges, six targets beside the base, seven targets with n; one
    # more bar each.
    assert cells == {4, 5, 7, 8, 10}


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=80))
def test_any_text_stays_text(text):
    from cgmerge.evals.report.tables import name

    page = Page(name(label(text)))
    assert page.tags == {"bdi"}
    assert "".join(page.text) == label(text)
    assert label(text).isprintable()
    assert not re.search(r"(?<!\\)[|`*<]", plain(text))


def test_the_page_asks_nobody_and_allows_nothing(demo):
    text = page_of(demo)
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    page = Page(text)
    assert "script" not in page.tags
    policy = next(v for t, n, v in page.attributes if t == "meta" and n == "content" and "src" in v)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_the_style_is_the_one_that_the_policy_names(demo):
    import base64
    import hashlib

    text = page_of(demo)
    style = re.search(r"<style>(.*?)</style>", text, flags=re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in text


def test_tables_can_be_read_aloud(demo):
    text = page_of(demo)
    assert text.count("<table") == text.count("<caption") == text.count('role="region"')
    assert not re.search(r"<th(?! scope)", text.replace("<thead", ""))
    svgs = re.findall(r"<svg[^>]*>", text)
    assert svgs
    assert all('role="img" aria-label="' in svg for svg in svgs)
    assert 'class="out">significantly worse, ' in text
    assert "best of its row" in text


def test_same_records_same_bytes(demo):
    again = make_evaluation(DEMO, kinds=KINDS)
    known = {"ties": Files(1234, "ties, scale 0.5", None)}
    assert page_of(demo, known=known) == page_of(again, known=known)
    first, second = (render_markdown(Report("T", sections_of(one))) for one in (demo, again))
    assert first == second


def test_markdown_has_the_numbers_of_the_page(demo):
    text = render_markdown(Report("T", sections_of(demo)))
    page = re.sub(r"<[^>]+>", " ", page_of(demo))
    assert "| old | 10 | 1.00 \\[0.72, 1.00\\] |" in text
    assert re.search(r"1\.00\s+0\.72 to 1\.00", page)
    assert "−0.80 ▼ \\[−1.00, −0.50\\], p = 0.039" in text
    assert re.search(r"−0\.80\s+▼\s+significantly worse,\s+−1\.00 to −0\.50\s+p = 0\.039", page)


def test_two_hundred_cells_with_long_names_are_small():
    answers = {
        f"target {t} " + "n" * 10_000: {f"skill {s} " + "m" * 10_000: "10" * 20 for s in range(10)}
        for t in range(20)
    }
    assert len(page_of(make_evaluation(answers)).encode()) < 2_000_000


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_text_has_contrast_and_the_scale_only_one_direction(theme):
    css = files("cgmerge").joinpath("assets", "report.css").read_text()
    block = re.findall(r":root \{(.*?)\}", css, flags=re.S)[theme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    pairs = [(f"t{i}", f"h{i}") for i in range(10)]
    pairs += [("ink", "paper"), ("quiet", "paper"), ("up", "up-paper"), ("down", "down-paper")]
    for text, paper in pairs:
        assert contrast(colours[text], colours[paper]) >= 4.5, (text, paper)
    for place in range(6):
        assert contrast(colours[f"c{place}"], colours["paper"]) >= 3.0  # lines and dots
    scale = [luminance(colours[f"h{i}"]) for i in range(10)]
    assert scale == sorted(scale, reverse=theme == 0)


def test_steps_of_the_scale():
    ends = (0.0, 1.0)
    assert [_step(score, ends) for score in (0.0, 0.09, 0.1, 0.999, 1.0)] == [0, 0, 1, 9, 9]
    assert [_step(score, (-3.0, -1.0)) for score in (-3.0, -2.0, -1.0)] == [0, 5, 9]
    assert _step(0.5, (0.5, 0.5)) == 9


def test_loglik_records_have_a_page_too():
    text = page_of(make_evaluation(DEMO, kinds=KINDS, metric="loglik"))
    Page(text)
    assert "Mean log-likelihood" in text
    assert "exact sign test" in text
    assert "−0.25" in text


def test_numbers_and_labels():
    assert (signed(0.2, plus=True), signed(0.0, plus=True), signed(-0.2)) == (
        "+0.20",
        "0.00",
        "−0.20",
    )
    assert label("") == "(no name)"
    assert label("a\n b\t\x00") == "a b\\x00" or label("a\n b\t\x00") == "a b\\t\\x00"
    assert len(label("y" * 10_000)) == 48
    found = labels(["y" * 100, "y" * 101, "z"])
    assert len(set(found.values())) == 3
    assert found["z"] == "z"


def test_many_warnings_are_cut(demo):
    record = replace(demo.record, warnings=tuple(f"w{i}" for i in range(1000)))
    text = page_of(replace(demo, record=record))
    assert "w19<" in text
    assert "w20<" not in text
    assert "and 980 more warnings" in text


def test_a_source_is_its_checked_record(tmp_path, demo):
    path = write(tmp_path / "r.json", DEMO, kinds=KINDS)
    source = open_source(path)
    assert (source.name, len(source.sha256)) == ("r.json", 64)
    (section,) = make_sections([source])
    assert section.top.mean == sections_of(demo)[0].top.mean
