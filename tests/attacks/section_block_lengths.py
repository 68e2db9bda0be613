"""A plane of blocks that announces other lengths than it has."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, 50, 1, 40, 40, 1, 0, *[0] * 27])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
