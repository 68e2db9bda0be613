"""A web page in front of the file."""

CODE = "damaged.file"


def build(sample):
    return b"<html><script>" + sample.build()
