"""The digest stands in the text twice, so that what it covers is unclear."""

import json
import zlib

import cge_forge

CODE = "damaged.digest"


def build(sample):
    digest = json.loads(sample.text(b""))["digest"]["manifest"]
    sample.manifest["producer"] = digest
    index = zlib.compress(cge_forge.compact(sample.index))
    text = sample.text(index)
    own = json.loads(text)["digest"]["manifest"]
    return sample.build(index=index, text=text.replace(digest, own))
