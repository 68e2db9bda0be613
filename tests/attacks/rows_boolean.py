"""A number of rows that is true."""

CODE = "damaged.index"


def build(sample):
    sample.index["coded"]["rows"][0] = True
    return sample.build()
