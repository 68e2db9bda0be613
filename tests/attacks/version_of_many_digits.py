"""A version of a million digits."""

CODE = "damaged.spec"


def build(sample):
    sample.manifest["spec"] = "cgmerge/" + "9" * 500_000
    return sample.build()
