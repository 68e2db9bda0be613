"""A tail that announces two thousand million quotients."""

CODE = "damaged.codec"


def build(sample):
    # The tensor m.a.lora_A has 3 rows of 40 entries.
    section = bytes([16, 1, 1, 0, 0, 0, 255, 255, 255, 255, 7, 0])
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
