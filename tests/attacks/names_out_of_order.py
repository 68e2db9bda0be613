"""Tensors that are not sorted by name."""

CODE = "damaged.index"


def build(sample):
    for column in sample.index["coded"].values():
        column.reverse()
    return sample.build()
