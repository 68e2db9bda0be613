"""A section of a few bytes that says it is 2^62 zeros."""

CODE = "unsafe.expansion"


def build(sample):
    table = sample.index["coded"]
    old = table["rows"][0] * table["columns"][0]
    table["rows"][0] = table["columns"][0] = (1 << 31) - 1
    sample.manifest["numel"] += table["rows"][0] * table["columns"][0] - old
    return sample.build()
