"""A second reader of `.cge` files, written from docs/FORMAT.md alone: numpy and nothing else.

It is simple rather than fast: gaps and unary codes are read one by one, as the page tells them.
Nothing of the package is imported. `python tests/cge_reader.py FILE` lists a file.
"""

import hashlib
import json
import math
import sys
import zlib

import numpy as np

LEVELS = {"I8": "<i1", "I16": "<i2", "I32": "<i4"}


class Bad(Exception):
    """The file is not as the page says."""


def need(condition, what):
    if not condition:
        raise Bad(what)


class Head:
    """Bytes and numbers of section 5."""

    def __init__(self, data):
        self.data, self.place = data, 0

    def byte(self):
        need(self.place < len(self.data), "section too short")
        self.place += 1
        return self.data[self.place - 1]

    def number(self):
        digits = []
        while not digits or digits[-1] & 128:
            digits.append(self.byte())
        need(len(digits) <= 5 and (len(digits) == 1 or digits[-1]), "number not in shortest form")
        return sum((digit & 127) << 7 * place for place, digit in enumerate(digits))


class Bits:
    """A string of bits, read from the front."""

    def __init__(self, data):
        self.all = np.unpackbits(np.frombuffer(data, np.uint8))
        self.place = 0

    def take(self, count):
        need(self.place + count <= len(self.all), "body too short")
        self.place += count
        return self.all[self.place - count : self.place]

    def unary(self, count, total):
        """Read `count` runs of zeros, each ended by a one, that add up to `total`."""
        runs, run = [], 0
        for bit in self.take(count + total).tolist():
            if bit:
                runs.append(run)
            run = 0 if bit else run + 1
        need(len(runs) == count and sum(runs) == total and run == 0, "unary plane")
        return np.array(runs, np.int64)

    def low(self, values, width):
        """Append `width` planes of low bits to numbers."""
        for _ in range(width):
            values = values * 2 + self.take(len(values))
        return values


def read_description(head, length, ones):
    """Section 6: the description of a plane, as a dictionary."""
    if ones in (0, length):
        return {"kind": None, "size": 0}
    byte = head.byte()
    kind, flipped = byte & ~64, byte >= 64
    found = {"kind": kind, "flipped": flipped, "count": length - ones if flipped else ones}
    count = found["count"]
    if kind == 0:
        need(not flipped, "flipped kind 0")
        return {**found, "size": length}
    if kind == 1:
        third, fourth = head.number(), head.number()
        return {**found, "size": 2 * -(-length // 3) + third + fourth}
    need(2 <= kind <= 41, "kind")
    step, total = kind - 2, head.number()
    base, shift = 2 + step % 2, step // 2
    need(total * base << shift <= length - count, "quotients do not fit")
    above = head.number() if base == 3 else 0
    size = count + total + count + above + shift * count
    return {**found, "size": size, "base": base, "shift": shift, "total": total, "above": above}


def read_plane(bits, found, length, ones):
    """Section 6: the bits of a plane."""
    if found["kind"] is None:
        return np.full(length, ones > 0)
    end = bits.place + found["size"]
    if found["kind"] == 0:
        plane = bits.take(length).astype(bool)
    elif found["kind"] == 1:
        plane = read_blocks(bits, length)
    else:
        plane = read_gaps(bits, found, length)
    need(bits.place == end, "plane of another length")
    if found["flipped"]:
        plane = ~plane
    need(int(plane.sum()) == ones, "ones of a plane")
    return plane


def read_blocks(bits, length):
    count = -(-length // 3)
    codes = [f"{a}{b}" for a, b in zip(bits.take(count), bits.take(count), strict=True)]
    longer = [place for place, code in enumerate(codes) if code != "00"]
    for place, bit in zip(longer, bits.take(len(longer)), strict=True):
        codes[place] += str(bit)
    longest = [place for place, code in enumerate(codes) if code == "111"]
    for place, bit in zip(longest, bits.take(len(longest)), strict=True):
        codes[place] += str(bit)
    table = {"00": "000", "110": "001", "010": "010", "011": "011", "100": "100", "101": "101",
             "1110": "110", "1111": "111"}  # fmt: skip
    blocks = [table[code] for code in codes]
    plane = np.array([block[row] == "1" for row in range(3) for block in blocks])
    need(not plane[length:].any(), "bits after the end of a plane")
    return plane[:length]


def read_gaps(bits, found, length):
    count = found["count"]
    quotients = bits.unary(count, found["total"])
    rests = bits.take(count).astype(np.int64)
    if found["base"] == 3:
        need(int(rests.sum()) == found["above"], "remainders")
        rests[rests == 1] += bits.take(found["above"])
    rests = bits.low(rests, found["shift"])
    gaps = quotients * (found["base"] << found["shift"]) + rests
    places = np.cumsum(gaps + 1) - 1
    need(places[-1] < length, "a place after the end")
    plane = np.zeros(length, bool)
    plane[places] = True
    return plane


def read_chunk_head(head, length):
    """Section 5.2: the head of a chunk."""
    kept = head.number()
    need(kept <= length, "more entries than there are")
    found = {"length": length, "kept": kept, "first": read_description(head, length, kept)}
    found.update(size=found["first"]["size"], thresholds=[], tail=0, shift=0, total=0)
    if kept == 0:
        return found
    found["size"] += kept
    last = kept
    for _ in range(head.byte()):
        above = head.number()
        need(above <= last, "more above a threshold than reached it")
        found["thresholds"].append((read_description(head, last, above), last, above))
        found["size"] += found["thresholds"][-1][0]["size"]
        last = above
    if last:
        found.update(tail=last, shift=head.byte(), total=head.number())
        need(found["shift"] <= 30 and found["total"] < 2**31, "tail")
        found["size"] += last * (1 + found["shift"]) + found["total"]
    return found


def read_chunk(data, found):
    """Section 5.2: the entries of a chunk."""
    bits = Bits(data)
    plane = read_plane(bits, found["first"], found["length"], found["kept"])
    signs = bits.take(found["kept"])
    magnitudes = np.ones(found["kept"], np.int64)
    left = np.arange(found["kept"])
    for description, length, ones in found["thresholds"]:
        left = left[read_plane(bits, description, length, ones)]
        magnitudes[left] += 1
    if found["tail"]:
        rest = bits.low(bits.unary(found["tail"], found["total"]), found["shift"])
        magnitudes[left] += rest
    need(not bits.all[bits.place :].any(), "padding")
    values = np.zeros(found["length"], np.int64)
    values[plane] = np.where(signs, -magnitudes, magnitudes)
    return values


def read_section(data, rows, columns):
    """Section 5: the levels of a tensor."""
    levels = np.zeros((rows, columns), np.int64)
    if levels.size == 0:
        need(not data, "bytes without entries")
        return levels
    head = Head(data)
    exponent = head.byte()
    need(16 <= exponent <= 20, "size of chunks")
    limit, groups = 1 << exponent, head.byte()
    need(1 <= groups <= min(64, rows), "groups")
    members = np.zeros(rows, np.int64)
    if groups > 1:
        width = (groups - 1).bit_length()
        size = -(-rows * width // 8)
        fields = Bits(data[head.place : head.place + size])
        head.place += size
        members = np.array([int("".join(map(str, fields.take(width))), 2) for _ in range(rows)])
        need(not fields.all[fields.place :].any(), "padding of groups")
        first_seen = list(dict.fromkeys(members.tolist()))
        need(first_seen == list(range(groups)), "order of groups")
    chunks = []
    bundle = max(1, limit // columns)
    for group in range(groups):
        own = np.flatnonzero(members == group)
        for first in range(0, len(own), bundle):
            part = own[first : first + bundle]
            chunks += [(part, start, min(start + limit, columns))
                       for start in range(0, columns, limit)]  # fmt: skip
    heads = [read_chunk_head(head, len(part) * (stop - start)) for part, start, stop in chunks]
    place = head.place
    for (part, start, stop), found in zip(chunks, heads, strict=True):
        size = -(-found["size"] // 8)
        body = data[place : place + size]
        need(len(body) == size, "section too short")
        levels[part, start:stop] = read_chunk(body, found).reshape(len(part), -1)
        place += size
    need(place == len(data), "length of the section")
    return levels


def read(data):
    """Read a whole file, all digests included.

    Returns:
        The manifest; coded tensors, name to (levels, scales, transposed); dense ones, name to
        (type, shape, bytes).
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    (text,) = header.pop("__metadata__").values()
    manifest = json.loads(text)
    need(manifest["spec"] == "cgmerge/1", "version")
    need(manifest["codec"] == {"name": "split-golomb", "version": 1}, "codec")
    digest = manifest["digest"]
    zeroed = text.replace(digest["manifest"], "0" * 64)
    need(hashlib.sha256(zeroed.encode()).hexdigest() == digest["manifest"], "digest.manifest")
    stored = {}
    for name, info in header.items():
        first, last = (8 + length + place for place in info["data_offsets"])
        stored[name] = (info["dtype"], info["shape"], data[first:last])
    need(hashlib.sha256(stored["index"][2]).hexdigest() == digest["index"], "digest.index")
    index = json.loads(zlib.decompress(stored["index"][2]))
    coded, lines = read_coded(index["coded"], stored["payload"][2], stored["scales"][2])
    dense = {}
    for name, crc in zip(index["dense"]["name"], index["dense"]["crc32"], strict=True):
        dtype, shape, content = dense[name] = stored["dense." + name]
        need(zlib.crc32(content) == crc, f"crc32 of {name}")
        line = " ".join(["dense", name, dtype, *map(str, shape)]) + "\n"
        lines[name] = hashlib.sha256(line.encode() + content).hexdigest()
    whole = "".join(f"{lines[name]}  {name}\n" for name in sorted(lines))
    need(hashlib.sha256(whole.encode()).hexdigest() == digest["content"], "digest.content")
    entries = sum(levels.size for levels, _, _ in coded.values())
    entries += sum(math.prod(shape) for _, shape, _ in dense.values())
    need(entries == manifest["numel"], "numel")
    return manifest, coded, dense


def read_coded(table, payload, factors):
    coded, lines = {}, {}
    place = scale = 0
    for row, name in enumerate(table["name"]):
        rows, columns, dtype = table["rows"][row], table["columns"][row], table["dtype"][row]
        count, transposed = table["scales"][row], table["transposed"][row]
        section = payload[place : place + table["bytes"][row]]
        own = factors[scale : scale + 4 * count]
        place, scale = place + table["bytes"][row], scale + 4 * count
        need(zlib.crc32(section + own) == table["crc32"][row], f"crc32 of {name}")
        levels = read_section(section, rows, columns).astype(LEVELS[dtype])
        coded[name] = (levels, np.frombuffer(own, "<f4"), bool(transposed))
        line = f"coded {name} {dtype} {rows} {columns} {count} {transposed}\n".encode()
        lines[name] = hashlib.sha256(line + own + levels.tobytes()).hexdigest()
    need(place == len(payload) and scale == len(factors), "lengths")
    return coded, lines


def main(path):
    with open(path, "rb") as file:  # noqa: PTH123  (the standard library is all there is)
        manifest, coded, dense = read(file.read())
    lines = [json.dumps(manifest, indent=2)]
    for name, (levels, scales, transposed) in coded.items():
        turned = ", transposed" if transposed else ""
        lines.append(f"{name}: {levels.dtype} {levels.shape}{turned}, {len(scales)} scales")
    for name, (dtype, shape, _) in dense.items():
        lines.append(f"{name}: {dtype} {shape}, as it is")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
