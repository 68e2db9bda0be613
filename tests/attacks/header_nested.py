"""A header nested a hundred thousand deep."""

import cge_forge

CODE = "unsafe.json_depth"


def build(sample):
    return cge_forge.raw_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"")
