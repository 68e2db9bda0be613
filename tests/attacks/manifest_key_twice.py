"""A key of the manifest occurs twice: one program reads one, another the other."""

import zlib

import cge_forge

CODE = "damaged.json"


def build(sample):
    index = zlib.compress(cge_forge.compact(sample.index))
    text = sample.text(index)
    return sample.build(index=index, text='{"spec":"cgmerge/1",' + text[1:])
