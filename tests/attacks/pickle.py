"""A pickle under the name of an expert."""

import pickle

CODE = "damaged.file"


def build(sample):
    return pickle.dumps({"weight": [1.0] * 100})
