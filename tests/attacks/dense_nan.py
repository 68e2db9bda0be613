"""A dense tensor that holds a number that is none."""

import struct

CODE = "damaged.not_finite"


def build(sample):
    sample.dense["m.bias"] = ("F32", [2], struct.pack("<ff", 1.0, float("nan")))
    sample.check_sums()
    return sample.build()
