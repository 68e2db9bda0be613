"""A magnitude of more than 2^31."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, 1, 0, 0, 30, 3, *[0] * 14, 0b00010000, 0, 0, 0, 0])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
