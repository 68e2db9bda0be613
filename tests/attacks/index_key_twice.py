"""A table of the index occurs twice."""

import zlib

import cge_forge

CODE = "damaged.json"


def build(sample):
    text = cge_forge.compact(sample.index)
    return sample.build(index=zlib.compress(b'{"coded":{},' + text[1:]))
