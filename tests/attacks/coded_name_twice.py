"""Two coded tensors of one name."""

CODE = "damaged.index"


def build(sample):
    for column in sample.index["coded"].values():
        column.insert(0, column[0])
    return sample.build()
