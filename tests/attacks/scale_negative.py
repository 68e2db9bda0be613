"""A scale that is negative."""

import struct

CODE = "damaged.scale"


def build(sample):
    sample.scales = struct.pack("<f", (-1.0)) + sample.scales[4:]
    sample.check_sums()
    return sample.build()
