"""True checksums, but another digest of the content: tensors were exchanged."""

CODE = "damaged.digest"


def build(sample):
    sample.manifest["digest"]["content"] = "ab" * 32
    return sample.build()
