"""A manifest that is a list."""

CODE = "damaged.json"


def build(sample):
    return sample.build(text="[]")
