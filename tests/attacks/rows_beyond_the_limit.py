"""More rows than 2^31."""

CODE = "damaged.index"


def build(sample):
    sample.index["coded"]["rows"][0] = 1 << 31
    return sample.build()
