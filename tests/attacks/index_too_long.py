"""An index of more than four megabytes, not inflated."""

CODE = "unsafe.index_size"


def build(sample):
    return sample.build(index=bytes(5 << 20))
