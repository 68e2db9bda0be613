"""A group that no row is in."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 2, 0, 0, 0, 0])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
