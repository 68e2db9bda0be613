"""A file that needs a feature which does not exist yet."""

CODE = "incompatible.must_understand"


def build(sample):
    sample.manifest.update(must_understand=["mixture"], mixture={"experts": 4})
    return sample.build()
