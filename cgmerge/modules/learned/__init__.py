"""Coefficients learned from a few examples: LoraHub, aTLAS, AdaMerging, LoRA Soups, and a choice.

All of them minimise something over Σ_e c[e, group]·ΔW_e: `presets` says what each stands for,
`mixture` attaches all experts once, `objectives` measures them on the examples, `optimisers`
search, `fit` puts these together, `crossval` measures what was learned on examples that it did not
see, `auto` chooses among methods that way, and `results` turns coefficients into a recipe.
"""
