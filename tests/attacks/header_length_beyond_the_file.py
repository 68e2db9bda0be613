"""A header that ends beyond the file."""

CODE = "damaged.file"


def build(sample):
    return (1 << 63).to_bytes(8, "little") + sample.build()[8:]
