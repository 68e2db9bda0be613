"""An integer of ten thousand digits, which Python itself refuses with another error."""

import zlib

import cge_forge

CODE = "damaged.json"


def build(sample):
    index = zlib.compress(cge_forge.compact(sample.index))
    sample.manifest["created"] = "HERE"
    return sample.build(index=index, text=sample.text(index).replace('"HERE"', "9" * 10_000))
