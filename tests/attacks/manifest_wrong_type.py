"""A number of entries that is a string."""

CODE = "damaged.manifest"


def build(sample):
    sample.manifest["numel"] = "260"
    return sample.build()
