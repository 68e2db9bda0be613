"""A manifest nested fifty thousand deep."""

CODE = "unsafe.depth"


def build(sample):
    return sample.build(text='{"a":' + "[" * 50_000 + "]" * 50_000 + "}")
