"""An ordinary safetensors file."""

import cge_forge

CODE = "damaged.metadata"


def build(sample):
    return cge_forge.safetensors({}, {"payload": ("U8", [2], b"ab")})
