"""A number in a longer form than it needs."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, 0x80, 0x00])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
