"""Make `.cge` files by hand, sound or not: parts that can be changed, sealed with true digests.

Nothing of the package is used, so that a fault in the writer cannot hide one in the reader.
"""

import copy
import hashlib
import json
import zlib
from dataclasses import dataclass, field

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1, "I8": 1, "BOOL": 1}
ZEROS = "0" * 64


def compact(value):
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


@dataclass
class Parts:
    """A file taken apart. `dense` maps names to (dtype, shape, bytes)."""

    manifest: dict
    index: dict
    payload: bytes
    scales: bytes
    dense: dict = field(default_factory=dict)

    @classmethod
    def of(cls, data):
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        manifest = json.loads(header.pop("__metadata__")["cgmerge"])
        found = {}
        for name, info in header.items():
            first, last = (8 + length + place for place in info["data_offsets"])
            found[name] = (info["dtype"], info["shape"], data[first:last])
        index = json.loads(zlib.decompress(found.pop("index")[2]))
        payload, scales = found.pop("payload")[2], found.pop("scales")[2]
        dense = {name.removeprefix("dense."): value for name, value in found.items()}
        return cls(manifest, index, payload, scales, dense)

    def copy(self):
        return copy.deepcopy(self)

    def sections(self):
        """Return the section of each coded tensor by name."""
        found, place = {}, 0
        table = self.index["coded"]
        for name, size in zip(table["name"], table["bytes"], strict=True):
            found[name] = self.payload[place : place + size]
            place += size
        return found

    def set_sections(self, sections):
        """Replace the payload; lengths and checksums in the index follow."""
        table = self.index["coded"]
        self.payload = b"".join(sections[name] for name in table["name"])
        table["bytes"] = [len(sections[name]) for name in table["name"]]
        self.check_sums()

    def check_sums(self):
        """Make the checksums in the index true."""
        table, place, scale = self.index["coded"], 0, 0
        for row, size in enumerate(table["bytes"]):
            count = 4 * table["scales"][row]
            data = self.payload[place : place + size] + self.scales[scale : scale + count]
            table["crc32"][row] = zlib.crc32(data)
            place, scale = place + size, scale + count
        table = self.index["dense"]
        table["crc32"] = [zlib.crc32(self.dense[name][2]) for name in table["name"]]

    def text(self, index):
        """Return the manifest's text with true digests of itself and of the index."""
        manifest = copy.deepcopy(self.manifest)
        digest = manifest.get("digest")
        if isinstance(digest, dict):
            digest["index"] = hashlib.sha256(index).hexdigest()
            digest["manifest"] = ZEROS
        return seal(compact(manifest).decode())

    def build(self, *, index=None, text=None):
        """Return the file; `index` (as stored) and `text` (the manifest) can be given."""
        index = zlib.compress(compact(self.index), 9) if index is None else index
        text = self.text(index) if text is None else text
        tensors = {
            "payload": ("U8", [len(self.payload)], self.payload),
            "scales": ("F32", [len(self.scales) // 4], self.scales),
            "index": ("U8", [len(index)], index),
            **{f"dense.{name}": value for name, value in self.dense.items()},
        }
        return safetensors({"cgmerge": text}, tensors)


def seal(text):
    """Fill in a manifest's digest of itself, where there are the zeros that stand for it."""
    own = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(f'"manifest":"{ZEROS}"', f'"manifest":"{own}"')


def safetensors(metadata, tensors):
    """Write a safetensors file: name to (dtype, shape, bytes)."""
    order = sorted(tensors, key=lambda name: (-WIDTHS[tensors[name][0]], name))
    header, place = {"__metadata__": metadata}, 0
    for name in order:
        dtype, shape, data = tensors[name]
        end = place + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    return raw_file(header, b"".join(tensors[name][2] for name in order))


def raw_file(header, body):
    """Write a header of any kind in front of any bytes."""
    if not isinstance(header, bytes):
        header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body
