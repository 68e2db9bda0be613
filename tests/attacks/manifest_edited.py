"""A manifest edited without its digest: another licence."""

CODE = "damaged.digest"


def build(sample):
    sample.manifest["license"] = "cc-by-nc-4.0"
    data = sample.build()
    return data.replace(b"cc-by-nc-4.0", b"cc-by-4.0-ok")
