"""Retrieval: embeddings without padding, centroids, and what a few examples are worth."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import routing_support as rs
import support
import torch

from cgmerge.errors import Damaged
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.embed import embed
from cgmerge.modules.routing.methods import FitInput, Labelled, find_routed
from cgmerge.modules.routing.retrieval import Likeness, recognised
from cgmerge.modules.routing.router import RetrievalRouter
from cgmerge.modules.routing.stack import stacks

NAMES = ["sort", "copy"]


def router_of(cosines, **options):
    """A router and an embedding that has these cosines with its experts."""
    centroids = torch.eye(len(cosines), 4)
    rest = math.sqrt(max(0.0, 1.0 - sum(c * c for c in cosines)))
    padded = [*cosines, *[0.0] * (3 - len(cosines)), rest]
    return RetrievalRouter(centroids, torch.zeros(4), **options), torch.tensor([padded])


def test_kernel_weights_by_hand():
    """Cosines .9, .86, .5 at β = 0.2: 0.0821, 0.0302, 3.7e-6; the last is below the threshold."""
    cosines = torch.tensor([0.9, 0.86, 0.5])
    centroids = torch.diag(cosines)  # not of length 1, so that one prompt has all three cosines
    router = RetrievalRouter(centroids, torch.zeros(3), width=0.2)
    prompt = torch.ones(1, 3) / math.sqrt(3)
    scaled = replace(router, centroids=centroids * math.sqrt(3))
    assert scaled.similarities(prompt)[0].tolist() == pytest.approx([0.9, 0.86, 0.5])
    found = scaled.weights(prompt)[0].tolist()
    assert found == pytest.approx([0.7311, 0.2689, 0.0], abs=1e-4)


def test_far_prompts_have_weights_too():
    router, prompt = router_of([-0.5, -0.6], width=0.01)
    assert router.weights(prompt)[0].tolist() == [1.0, 0.0]


def test_the_best_k_are_kept():
    router, prompt = router_of([0.3, 0.6, 0.5], choice=Choice(2, 0.1))
    assert router.weights(prompt)[0].tolist() == pytest.approx(
        [0.0, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))], abs=1e-5
    )


def test_embeddings_are_means_of_real_tokens():
    base = rs.llama()
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [5, 6, 7]]
    found = embed(base, prompts)
    for row, prompt in zip(found, prompts, strict=True):
        with torch.no_grad():
            states = base.model.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        assert torch.allclose(row, states.mean(dim=0), atol=1e-5)
    assert torch.equal(found[0], found[3])


def test_the_begin_token_does_not_count():
    base = rs.llama()
    base = replace(base, tokenizer=SimpleNamespace(bos_token_id=1))
    with torch.no_grad():
        states = base.model.base_model(input_ids=torch.tensor([[1, 6, 7]])).last_hidden_state[0]
    found = embed(base, [[1, 6, 7], [1]])
    assert torch.allclose(found[0], states[1:].mean(dim=0), atol=1e-5)
    assert torch.isfinite(found[1]).all()


def clouds(count, width=16, seed=0, loud=8.0):
    """Two experts that differ along one axis; along another, louder one both vary alike."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, count, width, generator=generator) * 0.3
    noise[..., 1] *= loud / 0.3
    noise[0, :, 0] += 1.5
    noise[1, :, 0] -= 1.5
    return list(noise)


def test_directions_within_experts_count_less():
    few, many = clouds(6), clouds(200, seed=1)
    fitted = Likeness.of(few)
    means = torch.stack([part.mean(dim=0) for part in few])
    plain = torch.nn.functional.normalize(means - means.mean(dim=0), dim=1)

    def right(router):
        return sum(
            int((router.similarities(part).argmax(dim=1) == e).sum()) for e, part in enumerate(many)
        )

    with_noise = RetrievalRouter(fitted.centroids, fitted.centre, fitted.noise)
    without = RetrievalRouter(plain, fitted.centre)
    assert right(with_noise) > 0.98 * 400
    assert right(without) < 0.9 * 400


def test_noise_is_that_of_the_shrunk_covariance():
    """I − UᵀU is ((1 − ρ)·S + ρ·v)^(−1/2) times a number."""
    parts = [part.double() for part in clouds(40, width=5)]
    noise = Likeness.of(parts).noise.double()
    within = torch.cat([part - part.mean(dim=0) for part in parts])
    covariance = within.T @ within / (80 - 2)
    shrunk = 0.8 * covariance + 0.2 * covariance.diagonal().mean() * torch.eye(5)
    values, vectors = torch.linalg.eigh(shrunk)
    wanted = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    found = torch.eye(5) - noise.T @ noise
    ratio = torch.diagonal(wanted).sum() / torch.diagonal(found).sum()
    assert torch.allclose(found * ratio, wanted, rtol=1e-3, atol=1e-3)


def test_single_examples_have_no_noise():
    fitted = Likeness.of([torch.randn(1, 6), torch.randn(1, 6)])
    assert fitted.noise.shape == (0, 6)
    assert torch.allclose(fitted.centroids.norm(dim=1), torch.ones(2), atol=1e-6)
    router = RetrievalRouter(fitted.centroids, fitted.centre, fitted.noise)
    assert set(router.tensors()) == {"centroids", "centre"}


def test_recognition_leaves_the_example_out():
    """Random prompts look like their own expert only to who has seen them."""
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(30, 40, generator=generator) for _ in range(2)]
    assert sum(recognised(random)) / 2 < 0.7
    assert min(recognised(clouds(10))) > 0.9
    assert recognised([clouds(10)[0], clouds(1)[1]])[1] is None


def test_one_expert_always_has_the_say():
    fitted = Likeness.of([torch.randn(4, 6)])
    router = RetrievalRouter(fitted.centroids, fitted.centre, fitted.noise)
    assert router.weights(torch.randn(3, 6)).tolist() == [[1.0]] * 3


def examples(base):
    """Prompts of one expert are written with low tokens, of the other with high ones."""
    generator = torch.Generator().manual_seed(2)

    def prompts(low, count):
        ids = torch.randint(low, low + 20, (count, 6), generator=generator)
        return [Encoded(row.tolist(), [4]) for row in ids]

    return [Labelled("copy", prompts(80, 8)), Labelled("sort", prompts(10, 8))]


def test_prompts_go_to_the_expert_whose_examples_they_resemble():
    base, method = rs.llama(), find_routed("retrieval")
    given = examples(base)
    found = stacks([rs.expert(support.llama_shapes(), 2, seed) for seed in (1, 2)])
    seen = []
    fitted = method.make(
        FitInput(
            names=NAMES,
            stacks=found,
            loaded=base,
            examples=given,
            params=method.make_params(),
            progress=lambda *step: seen.append(step),
        )
    )
    assert seen == [(1, 2), (2, 2)]
    assert [entry["name"] for entry in fitted.record["experts"]] == NAMES
    assert min(entry["recognised"] for entry in fitted.record["experts"]) >= 0.75
    assert fitted.warnings == []
    new = {item.name: item.rows for item in examples(base)}
    for number, name in enumerate(NAMES):
        weights = fitted.router.weights(embed(base, [row.prompt_ids for row in new[name]]))
        assert weights[:, number].mean() > 0.9
    again = RetrievalRouter.restore(fitted.router.settings(), fitted.router.tensors())
    embedded = embed(base, [[5, 6, 90]])
    assert torch.equal(again.weights(embedded), fitted.router.weights(embedded))


def test_experts_whose_prompts_look_alike_are_named():
    base, method = rs.llama(), find_routed("retrieval")
    same = [Encoded(row.prompt_ids, [4]) for row in rs.rows(10, seed=1)]
    given = [Labelled("sort", same), Labelled("copy", same)]
    found = stacks([rs.expert(support.llama_shapes(), 2, seed) for seed in (1, 2)])
    fitted = method.make(
        FitInput(
            names=NAMES, stacks=found, loaded=base, examples=given, params=method.make_params()
        )
    )
    assert len(fitted.warnings) == 1
    assert "look more like another expert's" in fitted.warnings[0]
    assert "--method gate" in fitted.warnings[0]


def test_files_with_other_tensors_are_refused():
    router = RetrievalRouter(torch.eye(2, 4), torch.zeros(4), torch.ones(1, 4))
    settings, tensors = router.settings(), router.tensors()
    assert torch.equal(RetrievalRouter.restore(settings, tensors).noise, router.noise)
    for bad in ({**tensors, "extra": torch.zeros(1)}, {"centre": tensors["centre"]}):
        with pytest.raises(Damaged, match="a retrieval router with tensors"):
            RetrievalRouter.restore(settings, bad)
    with pytest.raises(Damaged, match="noise"):
        RetrievalRouter.restore(settings, {**tensors, "noise": torch.ones(1, 5)})
