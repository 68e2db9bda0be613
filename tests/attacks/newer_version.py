"""A file of the next version of the format."""

CODE = "incompatible.version"


def build(sample):
    sample.manifest["spec"] = "cgmerge/2"
    return sample.build()
