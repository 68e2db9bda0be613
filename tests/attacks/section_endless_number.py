"""A number that never ends."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, *[0x80] * 40])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
