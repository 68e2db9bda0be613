"""A dense tensor whose name ends early in C."""

CODE = "unsafe.name"


def build(sample):
    sample.dense["m.bias\0.txt"] = ("F32", [1], bytes(4))
    return sample.build()
