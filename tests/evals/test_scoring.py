"""Teacher forcing against plain log-softmax, against generation, and against its own batches."""

import pytest
import tiny_model as tiny
import torch

from cgmerge.errors import Damaged, UsageError
from cgmerge.evals import scoring
from cgmerge.evals.scoring import generate, position_limit, score
from cgmerge.modules.data import Encoded, Example, encode_all

END = 1
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rows():
    made = tiny.make_rows("reverse", 60, seed=5) + tiny.make_rows("copy", 30, seed=5)
    examples = [Example(row["prompt"], row["completion"]) for row in made]
    return encode_all(examples, tiny.make_tokenizer())


@pytest.fixture(scope="module")
def half_trained():
    """Right on some items and wrong on others: both directions of the agreement are tested."""
    model = tiny.make_model(3)
    training = tiny.make_rows("copy", 400, seed=1) + tiny.make_rows("reverse", 400, seed=2)
    return tiny.train(model, tiny.make_tokenizer(), training)


def plain(model, row):
    """One row at a time, full logits, textbook formula."""
    ids = torch.tensor([row.prompt_ids + row.target_ids])
    with torch.no_grad():
        logs = torch.log_softmax(model(input_ids=ids).logits[0].float(), dim=-1)
    start = len(row.prompt_ids) - 1
    logs = logs[start : start + len(row.target_ids)]
    target = torch.tensor(row.target_ids)
    loglik = logs.gather(1, target[:, None]).mean().item()
    return bool((logs.argmax(-1) == target).all()), loglik, tuple(logs.argmax(-1).tolist())


def test_scores_equal_the_textbook_formula(half_trained, rows):
    scores = score(half_trained, rows, batch_size=7)
    for row, found in zip(rows, scores, strict=True):
        correct, loglik, predicted = plain(half_trained, row)
        assert found.correct == correct
        assert found.predicted == predicted
        assert found.loglik == pytest.approx(loglik, abs=1e-5)
    right = sum(found.correct for found in scores)
    assert 10 <= right <= len(rows) - 10, "the fixture must have right and wrong items"


@pytest.mark.parametrize("size", [1, 4, 9])
@pytest.mark.fault("F40")
def test_batch_size_changes_nothing(half_trained, rows, size):
    alone = score(half_trained, rows, batch_size=1)
    together = score(half_trained, rows, batch_size=size)
    for one, other in zip(alone, together, strict=True):
        assert other.loglik == pytest.approx(one.loglik, abs=1e-5)
        assert other.correct == one.correct


@pytest.mark.parametrize("which", ["random", "trained"])
def test_generation_agrees_item_by_item(half_trained, rows, which):
    model = half_trained if which == "trained" else tiny.make_model(11)
    if which == "random":  # a random model is right on its own answers and wrong on all others
        own = generate(model, rows[:20], ends=[END], batch_size=8)
        rows = rows + [Encoded(r.prompt_ids, list(o)) for r, o in zip(rows, own, strict=False)]
    scores = score(model, rows, batch_size=16)
    for size in (1, 5, 32) if which == "trained" else (16,):
        written = generate(model, rows, ends=[END], batch_size=size)
        same = [
            (list(tokens) == row.target_ids) == found.correct
            for tokens, row, found in zip(written, rows, scores, strict=True)
            if not found.tied and row.target_ids[-1] == END
        ]
        assert all(same)
        assert len(same) >= len(rows) - 20
    assert any(found.correct for found in scores)
    assert not all(found.correct for found in scores)


def test_the_end_token_counts(half_trained, rows):
    """An answer that goes on is wrong even when every letter is right."""
    right = next(
        row
        for row, s in zip(rows, score(half_trained, rows, batch_size=8), strict=True)
        if s.correct
    )
    short = Encoded(right.prompt_ids, [*right.target_ids[:-2], END])
    assert not score(half_trained, [short], batch_size=1)[0].correct
    assert score(half_trained, [right], batch_size=1)[0].predicted[-1] == END


def test_order_is_kept_and_progress_adds_up(half_trained, rows):
    seen = []
    forward = score(half_trained, rows, batch_size=4, advance=seen.append)
    backward = score(half_trained, rows[::-1], batch_size=4)
    assert [s.predicted for s in backward[::-1]] == [s.predicted for s in forward]
    assert sum(seen) == len(rows)
    assert max(seen) == 4


def test_a_small_budget_makes_small_batches_with_the_same_scores(half_trained, rows, monkeypatch):
    seen = []
    free = score(half_trained, rows, batch_size=32)
    monkeypatch.setattr(scoring, "LOGIT_BUDGET", 20 * len(tiny.WORDS))
    tight = score(half_trained, rows, batch_size=32, advance=seen.append)
    assert max(seen) <= 20 / 3  # at least three positions a row
    assert [s.correct for s in tight] == [s.correct for s in free]


def test_models_without_logits_to_keep_are_sliced(half_trained, rows):
    class Plain(torch.nn.Module):
        """A model whose forward knows neither positions nor which logits are wanted."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.config, self.device = inner, inner.config, inner.device

        def forward(self, input_ids, attention_mask, use_cache):
            return self.inner(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache
            )

    found = score(Plain(half_trained), rows, batch_size=8)
    expected = score(half_trained, rows, batch_size=8)
    assert [s.predicted for s in found] == [s.predicted for s in expected]
    assert [s.loglik for s in found] == pytest.approx([s.loglik for s in expected], abs=1e-5)


def test_logits_are_computed_at_target_positions_only(half_trained, rows):
    shapes = []
    hook = half_trained.lm_head.register_forward_hook(
        lambda _m, _i, out: shapes.append(out.shape[1])
    )
    try:
        score(half_trained, rows, batch_size=1)
    finally:
        hook.remove()
    assert sorted(shapes) == sorted(len(row.target_ids) for row in rows)


def test_own_generation_settings_are_ignored_and_kept(half_trained, rows):
    expected = generate(half_trained, rows, ends=[END], batch_size=16)
    half_trained.generation_config.repetition_penalty = 5.0
    half_trained.generation_config.no_repeat_ngram_size = 1
    half_trained.generation_config.suppress_tokens = [7, 8, 9]
    try:
        assert generate(half_trained, rows, ends=[END], batch_size=16) == expected
        assert half_trained.generation_config.repetition_penalty == 5.0
    finally:
        half_trained.generation_config.repetition_penalty = None
        half_trained.generation_config.no_repeat_ngram_size = None
        half_trained.generation_config.suppress_tokens = None


def test_training_mode_is_left_and_restored(half_trained, rows):
    expected = score(half_trained, rows[:5], batch_size=5)
    half_trained.model.layers[0].train()  # a mixture, as frozen parts have
    try:
        half_trained.model.layers[1].self_attn.attention_dropout = 0.9
        half_trained.model.layers[1].train()
        assert score(half_trained, rows[:5], batch_size=5) == expected
        assert half_trained.model.layers[0].training
        assert not half_trained.lm_head.training
    finally:
        half_trained.model.layers[1].self_attn.attention_dropout = 0.0
        half_trained.eval()


@pytest.mark.fault("F40")
def test_generation_never_passes_the_positions(half_trained):
    """Long prompt and long target in one batch would ask for positions that do not exist."""
    limit = position_limit(half_trained)
    assert limit == tiny.POSITIONS
    long_prompt = Encoded([7] * (limit - 2), [8, END])
    long_target = Encoded([7], [8] * (limit - 2) + [END])
    written = generate(half_trained, [long_prompt, long_target], ends=[END], batch_size=2)
    assert len(written[0]) <= 2
    assert len(written[1]) <= limit - 1


def test_exact_ties_are_marked():
    model = tiny.make_model(1)
    torch.nn.init.zeros_(model.lm_head.weight)
    found = score(model, [Encoded([3, 4], [0, 0])], batch_size=1)[0]
    assert found.tied
    assert found.predicted == (0, 0)  # the first of equals
    assert found.loglik == pytest.approx(-torch.tensor(float(len(tiny.WORDS))).log().item())


def test_nan_is_an_error_not_a_score():
    model = tiny.make_model(1)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(Damaged) as caught:
        score(model, [Encoded([3, 4], [5, 1])], batch_size=1)
    assert caught.value.code == "damaged.not_finite"


@pytest.mark.parametrize(
    ("row", "size"), [(Encoded([], [1]), 1), (Encoded([1], []), 1), (Encoded([1], [1]), 0)]
)
def test_impossible_requests_are_refused(half_trained, row, size):
    with pytest.raises(UsageError):
        score(half_trained, [row], batch_size=size)


def test_learned_positions_padding_and_limits():
    """GPT-2 looks positions up in a table: wrong ones change scores, too many crash."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4,
        bos_token_id=None, eos_token_id=END, pad_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    rng = torch.Generator().manual_seed(3)

    def draw(count):
        return torch.randint(2, 20, (count,), generator=rng).tolist()

    sizes = [(1, 15), (14, 2), (15, 1), (3, 4), (7, 2), (2, 9), (5, 5)]
    rows = [Encoded(draw(prompt), [*draw(target - 1), END]) for prompt, target in sizes]
    own = generate(model, rows, ends=[END], batch_size=1)
    rows += [Encoded(r.prompt_ids, list(o)) for r, o in zip(rows, own, strict=True)]
    rows = [row for row in rows if len(row) <= 16]
    alone = score(model, rows, batch_size=1)
    for size in (2, 5, 14):
        together = score(model, rows, batch_size=size)
        assert [s.loglik for s in together] == pytest.approx([s.loglik for s in alone], abs=1e-5)
        written = generate(model, rows, ends=[END], batch_size=size)
        for tokens, row, found in zip(written, rows, alone, strict=True):
            assert (list(tokens[: len(row.target_ids)]) == row.target_ids) == found.correct
    assert any(found.correct for found in alone)
