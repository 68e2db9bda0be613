"""A zip archive behind the file, which unpackers would find."""

CODE = "damaged.file"


def build(sample):
    return sample.build() + b"PK\x05\x06" + bytes(18)
