"""A name that is not a string."""

CODE = "unsafe.name"


def build(sample):
    sample.index["coded"]["name"][0] = 7
    return sample.build()
