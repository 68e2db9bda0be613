"""Levels declared wider than they are: two files of one content."""

CODE = "damaged.codec"


def build(sample):
    sample.index["coded"]["dtype"][0] = "I16"
    return sample.build()
