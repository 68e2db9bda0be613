"""Train one LoRA expert per skill: settings, plan, checkpoints, the run itself.

`settings` says what the user may choose, `recipe` reads several skills from YAML, `plan` turns
settings and data into everything that is known before the first step (with `skeleton`: the base
without weights, and `defaults`: what the user left open), `checkpoints` keeps what a killed run
needs to go on, `trainer` is the only module that imports trl, `adapter` writes and proves the
result, and `run` ties them together.
"""
