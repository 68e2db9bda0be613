"""Magnitudes of more low bits than any."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, 1, 0, 0, 31, 0, *[0] * 30])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
