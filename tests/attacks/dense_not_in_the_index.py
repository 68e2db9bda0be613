"""A dense tensor that the index does not know, and no checksum covers."""

CODE = "damaged.layout"


def build(sample):
    sample.dense["m.more"] = ("F32", [1], bytes(4))
    return sample.build()
