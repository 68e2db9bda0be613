"""White space in the header, where bytes for another program could hide."""

import cge_forge

CODE = "damaged.header"


def build(sample):
    data = sample.build()
    length = int.from_bytes(data[:8], "little")
    return cge_forge.raw_file(
        data[8 : 8 + length].replace(b'"payload":', b'"payload": '), data[8 + length :]
    )
