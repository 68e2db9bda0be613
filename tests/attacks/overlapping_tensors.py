"""Two tensors share bytes."""

import json

import cge_forge

CODE = "damaged.file"


def build(sample):
    data = sample.build()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["index"]["data_offsets"] = [place - 4 for place in header["index"]["data_offsets"]]
    return cge_forge.raw_file(header, data[8 + length :])
