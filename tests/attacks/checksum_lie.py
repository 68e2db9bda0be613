"""A checksum that is not that of the section."""

CODE = "damaged.crc32"


def build(sample):
    sample.index["coded"]["crc32"][1] ^= 1
    return sample.build()
