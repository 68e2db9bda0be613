"""A tensor of the header that is neither of the three nor dense."""

import cge_forge

CODE = "unsafe.name"


def build(sample):
    data = sample.build()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"dense.m.bias"', b'"stray.m.bias"')
    return cge_forge.raw_file(header, data[8 + length :])
