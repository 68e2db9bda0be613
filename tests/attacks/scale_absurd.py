"""A scale that is absurd."""

import struct

CODE = "damaged.scale"


def build(sample):
    sample.scales = struct.pack("<f", 1e30) + sample.scales[4:]
    sample.check_sums()
    return sample.build()
