"""A tensor that is both coded and dense."""

CODE = "damaged.index"


def build(sample):
    sample.index["dense"]["name"][0] = "m.a.lora_A"
    sample.dense = {"m.a.lora_A" if key == "m.bias" else key: value
                    for key, value in sample.dense.items()}  # fmt: skip
    return sample.build()
