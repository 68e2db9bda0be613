"""A number beyond all floating-point numbers."""

import zlib

import cge_forge

CODE = "damaged.json"


def build(sample):
    index = zlib.compress(cge_forge.compact(sample.index))
    sample.manifest["fidelity"] = {"cosine": "HERE"}
    return sample.build(index=index, text=sample.text(index).replace('"HERE"', "1e999"))
