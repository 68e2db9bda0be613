"""A scale that is infinite."""

import struct

CODE = "damaged.scale"


def build(sample):
    sample.scales = struct.pack("<f", float("inf")) + sample.scales[4:]
    sample.check_sums()
    return sample.build()
