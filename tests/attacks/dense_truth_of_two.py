"""A truth value that is neither 0 nor 1."""

CODE = "damaged.not_finite"


def build(sample):
    sample.dense["m.bias"] = ("BOOL", [2], bytes([1, 2]))
    sample.check_sums()
    return sample.build()
