"""Sixty million zeros, which the limit allows, in a section of three bytes."""

CODE = "damaged.codec"


def build(sample):
    table = sample.index["coded"]
    old = table["rows"][0] * table["columns"][0]
    table["rows"][0], table["columns"][0] = 1, 60_000_000
    sample.manifest["numel"] += 60_000_000 - old
    sample.set_sections({**sample.sections(), "m.a.lora_A": bytes([20, 1, 0])})
    return sample.build()
