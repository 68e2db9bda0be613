"""Two thousand million rows of no entries; the section has bytes."""

CODE = "damaged.codec"


def build(sample):
    table = sample.index["coded"]
    old = table["rows"][0] * table["columns"][0]
    table["rows"][0], table["columns"][0] = (1 << 31) - 1, 0
    sample.manifest["numel"] -= old
    return sample.build()
