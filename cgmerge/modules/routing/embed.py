"""What the base itself makes of a prompt: one vector, for choosing experts by likeness."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.modules.loading import LoadedBase

_BATCH_TOKENS = 1 << 13


def embed(loaded: LoadedBase, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "prompts width"]:
    """Return the mean of the base's last hidden states over a prompt.

    The begin-of-text token is the same for all and is left out. Padding is masked, so that a
    prompt's vector does not depend on its batch-mates.

    Args:
        loaded: The base, without experts.
        prompts: Token ids of at least one token each.

    Returns:
        Float32, in the order of the prompts.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: list[Tensor] = [torch.empty(0)] * len(prompts)
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * len(prompts[i]) > _BATCH_TOKENS:
            _embed_batch(loaded, prompts, batch, found)
            batch = []
        batch.append(i)
    if batch:
        _embed_batch(loaded, prompts, batch, found)
    return torch.stack(found)


def _embed_batch(
    loaded: LoadedBase, prompts: Sequence[Sequence[int]], batch: list[int], found: list[Tensor]
) -> None:
    model, device = loaded.model, loaded.model.device
    width = max(len(prompts[i]) for i in batch)
    ids = torch.tensor([[*prompts[i], *[0] * (width - len(prompts[i]))] for i in batch])
    mask = torch.tensor([[1] * len(prompts[i]) + [0] * (width - len(prompts[i])) for i in batch])
    ids, mask = ids.to(device), mask.to(device)
    with torch.no_grad():
        states = model.base_model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).last_hidden_state.float()
    counted = mask.clone()
    begin = loaded.tokenizer.bos_token_id
    if begin is not None and width > 1:
        alone = mask.sum(dim=1) == 1
        counted[:, 0] = torch.where((ids[:, 0] == begin) & ~alone, 0, counted[:, 0])
    means = (states * counted[:, :, None]).sum(dim=1) / counted.sum(dim=1, keepdim=True)
    for place, i in enumerate(batch):
        found[i] = means[place]
