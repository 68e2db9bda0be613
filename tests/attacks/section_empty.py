"""A section without a byte for a tensor with entries."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
