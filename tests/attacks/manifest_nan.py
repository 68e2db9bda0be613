"""A score that is not a number."""

CODE = "damaged.json"


def build(sample):
    sample.manifest["fidelity"] = {"cosine": float("nan")}
    return sample.build()
