"""Levels of a type that the format lacks."""

CODE = "damaged.index"


def build(sample):
    sample.index["coded"]["dtype"][0] = "I64"
    return sample.build()
