"""An index whose stream ends early."""

import zlib

import cge_forge

CODE = "damaged.index"


def build(sample):
    return sample.build(index=zlib.compress(cge_forge.compact(sample.index))[:-3])
