"""Write docs/cge-manifest.schema.json, what the manifest of a .cge file may hold, from the code."""

import json
from pathlib import Path

TARGET = Path(__file__).parent.parent / "docs" / "cge-manifest.schema.json"


def build() -> str:
    from cgmerge.modules.compress.manifest import Manifest

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= Manifest.model_json_schema()
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(build())
