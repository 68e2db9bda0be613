"""Padding that is not 0."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, 0x78, 1, 0, *[255] * 15, 1])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
