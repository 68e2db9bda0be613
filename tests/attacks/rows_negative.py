"""A negative number of rows."""

CODE = "damaged.index"


def build(sample):
    sample.index["coded"]["rows"][0] = -3
    return sample.build()
