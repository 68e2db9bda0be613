"""A gap that leads beyond the plane, though its quotient fits."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, 1, 12, 1, 1, 0, 0b01111111, 0])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
