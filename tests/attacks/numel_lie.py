"""A manifest that says more entries than there are."""

CODE = "damaged.layout"


def build(sample):
    sample.manifest["numel"] += 1
    return sample.build()
