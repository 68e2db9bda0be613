"""A column of the index is missing."""

CODE = "damaged.index"


def build(sample):
    del sample.index["coded"]["crc32"]
    return sample.build()
