"""A name of more than 256 characters."""

CODE = "unsafe.name"


def build(sample):
    sample.index["coded"]["name"][0] = "a" * 257
    return sample.build()
