"""A checksum that is not that of a dense tensor."""

CODE = "damaged.crc32"


def build(sample):
    sample.index["dense"]["crc32"][0] ^= 1
    return sample.build()
