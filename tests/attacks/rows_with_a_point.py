"""A number of rows that is not whole."""

CODE = "damaged.index"


def build(sample):
    sample.index["coded"]["rows"][0] = 3.0
    return sample.build()
