"""An index of a hundred kilobytes that inflates to a hundred megabytes."""

import zlib

CODE = "unsafe.index_size"


def build(sample):
    return sample.build(index=zlib.compress(bytes(100_000_000), 9))
