"""A dense tensor named like a file outside."""

CODE = "unsafe.name"


def build(sample):
    sample.dense["../../x"] = ("F32", [1], bytes(4))
    return sample.build()
