"""Metadata besides the manifest, which would have no fixed order."""

import json

import cge_forge

CODE = "damaged.metadata"


def build(sample):
    data = sample.build()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["more"] = "x"
    return cge_forge.raw_file(header, data[8 + length :])
