"""Half a character, which cannot be printed or written."""

import zlib

import cge_forge

CODE = "damaged.json"


def build(sample):
    index = zlib.compress(cge_forge.compact(sample.index))
    text = sample.text(index).replace("some/base", "\\ud800")
    return sample.build(index=index, text=text)
