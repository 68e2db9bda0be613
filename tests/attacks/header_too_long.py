"""A header of more than a megabyte."""

import cge_forge

CODE = "unsafe.header_size"


def build(sample):
    text = b'{"__metadata__":{"cgmerge":"' + b"x" * (1 << 20) + b'"}}'
    return cge_forge.raw_file(text, b"")
