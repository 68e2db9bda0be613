"""Train one LoRA expert per skill: settings, plan, checkpoints, the run itself.

`settings` says what the user may choose, `recipe` reads several skills from YAML, `plan` turns
settings and data into everything that is known before the first step, `checkpoints` keeps what a
killed run needs to go on, `trainer` is the only module that imports trl, and `run` ties them
together and commits the expert.
"""
