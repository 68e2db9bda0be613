"""A manifest nested deeper than any honest one."""

CODE = "unsafe.depth"


def build(sample):
    value = []
    for _ in range(20):
        value = [value]
    sample.manifest["fidelity"] = {"a": value}
    return sample.build()
