"""A manifest that names no base."""

CODE = "damaged.manifest"


def build(sample):
    del sample.manifest["base"]
    return sample.build()
