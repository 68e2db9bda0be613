"""An index that is not the one of the manifest."""

CODE = "damaged.digest"


def build(sample):
    text = sample.text(b"another")
    return sample.build(text=text)
