"""A tensor that is transposed twice."""

CODE = "damaged.index"


def build(sample):
    sample.index["coded"]["transposed"][0] = 2
    return sample.build()
