"""More tensors than any expert has."""

CODE = "unsafe.tensors"


def build(sample):
    count = 10_001
    table = sample.index["coded"]
    table["name"] = [f"t{number:05d}" for number in range(count)]
    for key in table:
        if key != "name":
            table[key] = [table[key][0]] * count
    return sample.build()
