"""An index that inflates to a million lists: small as text, large as objects."""

import zlib

CODE = "unsafe.parts"


def build(sample):
    text = b'{"coded":[' + b"[]," * 1_300_000 + b"[]]}"
    return sample.build(index=zlib.compress(text, 9))
