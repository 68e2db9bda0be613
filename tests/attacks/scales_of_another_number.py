"""Two scales for three rows."""

CODE = "damaged.index"


def build(sample):
    sample.index["coded"]["scales"][0] = 2
    return sample.build()
