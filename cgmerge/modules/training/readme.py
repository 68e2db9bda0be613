"""The README.md of an expert: a short model card with the front matter that hubs read."""

import json

from cgmerge.modules.card import ExpertCard
from cgmerge.modules.training.plan import Plan
from cgmerge.modules.usage import peft_snippet
from cgmerge.shown import counted, score_text

_TEMPLATE = """\
---
base_model: {base}
base_model_relation: adapter
library_name: peft
pipeline_tag: text-generation
tags:
- lora
- cgmerge
---

# {skill}

A LoRA expert for the skill `{skill}` on the base `{name}`: rank {rank}, alpha {alpha}, trained
with cgmerge {version}.

| | |
|---|---|
| data | {data} |
| training | {steps} of {batch}, learning rate {lr:g}, seed {seed} |
| loss | {loss:.4f} over the last steps |
{scores}
`expert.json` holds every setting, the digests of data and files, and the fingerprint of the base.

In this folder:

```python
{snippet}
```
"""


def readme(card: ExpertCard, plan: Plan) -> str:
    """Write the card for people; the same run gives the same text.

    Args:
        card: The expert's card.
        plan: What was trained.
    """
    chosen, settings = plan.chosen, plan.settings
    scores = card.metrics.get("eval")
    line = ""
    if scores is not None:
        line = (
            f"| evaluation | exact match {score_text(scores['exact_match'], 3)} on"
            f" {counted(scores['n'], 'row')}"
            f" (base {score_text(scores['base_exact_match'], 3)}) |\n"
        )
    return _TEMPLATE.format(
        base=json.dumps(card.base.name, ensure_ascii=False),
        name=card.base.name,
        skill=card.skill,
        rank=settings.rank,
        alpha=chosen.alpha,
        version=card.versions["cgmerge"],
        data=", ".join(f"{source.name} ({counted(source.rows, 'row')})" for source in card.data),
        steps=counted(chosen.steps, "step"),
        batch=counted(plan.step_rows, "row"),
        lr=chosen.lr,
        seed=settings.seed,
        loss=card.metrics["loss"],
        scores=line,
        snippet=peft_snippet(card.base.name, "."),
    )
