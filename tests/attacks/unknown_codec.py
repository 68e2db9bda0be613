"""Levels coded in a way that this version does not know."""

CODE = "incompatible.codec"


def build(sample):
    sample.manifest["codec"] = {"name": "ans243", "version": 1}
    return sample.build()
