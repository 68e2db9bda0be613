"""Bytes behind the stream of the index."""

import zlib

import cge_forge

CODE = "damaged.index"


def build(sample):
    return sample.build(index=zlib.compress(cge_forge.compact(sample.index)) + b"tail")
