"""A coded tensor named like a file outside."""

CODE = "unsafe.name"


def build(sample):
    sample.index["coded"]["name"][0] = "../../etc/passwd"
    return sample.build()
