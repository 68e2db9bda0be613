"""A scale that is nan."""

import struct

CODE = "damaged.scale"


def build(sample):
    sample.scales = struct.pack("<f", float("nan")) + sample.scales[4:]
    sample.check_sums()
    return sample.build()
