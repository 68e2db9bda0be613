"""EleutherAI's lm-evaluation-harness on any target: its tasks, prompts and metrics, our models.

`folder` reads task files of strangers and lets nothing through that runs; `model` answers the
harness's requests with whatever target is in memory; `harness` is the only file that imports it;
`translate` turns what it returns into items; `run` makes the record.
"""
