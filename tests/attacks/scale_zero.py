"""A scale that is zero."""

import struct

CODE = "damaged.scale"


def build(sample):
    sample.scales = struct.pack("<f", 0.0) + sample.scales[4:]
    sample.check_sums()
    return sample.build()
