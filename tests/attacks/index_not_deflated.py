"""An index in plain text."""

CODE = "damaged.index"


def build(sample):
    return sample.build(index=b'{"coded":{}}')
