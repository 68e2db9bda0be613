"""Groups of sixty million rows of one entry, whose list would take gigabytes."""

CODE = "damaged.codec"


def build(sample):
    table = sample.index["coded"]
    old = table["rows"][0] * table["columns"][0]
    table["rows"][0], table["columns"][0] = 60_000_000, 1
    sample.manifest["numel"] += 60_000_000 - old
    section = bytes([16, 2, 64]) + bytes(7_500_000)
    sample.set_sections({**sample.sections(), "m.a.lora_A": section})
    return sample.build()
