"""Sections that add up to more than the payload."""

CODE = "damaged.layout"


def build(sample):
    sample.index["coded"]["bytes"][0] += 1
    return sample.build()
