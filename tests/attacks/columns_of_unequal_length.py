"""A column of the index is shorter than the others."""

CODE = "damaged.index"


def build(sample):
    sample.index["coded"]["rows"].pop()
    return sample.build()
