"""The payload is declared as signed bytes."""

import cge_forge

CODE = "damaged.layout"


def build(sample):
    data = sample.build()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"payload":{"dtype":"U8"', b'"payload":{"dtype":"I8"')
    return cge_forge.raw_file(header, data[8 + length :])
