"""A unary plane of zeros."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, 5, 2, 20, 1, 0, *[0] * 5])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
