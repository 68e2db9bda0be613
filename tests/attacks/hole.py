"""Bytes between two tensors that belong to none."""

import json

import cge_forge

CODE = "damaged.file"


def build(sample):
    data = sample.build()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["payload"]["data_offsets"] = [place + 9 for place in header["payload"]["data_offsets"]]
    first = 8 + length + header["payload"]["data_offsets"][0] - 9
    return cge_forge.raw_file(header, data[8 + length : first] + b"#!/bin/sh" + data[first:])
