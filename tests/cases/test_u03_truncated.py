"""U03: a truncated or half-downloaded weight file."""

import case_support as cases
import pytest

WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize("command", ["inspect", "compose"])
@pytest.mark.fault("F01")
def test_half_a_file(run, experts, command):
    path = experts / "E1" / WEIGHTS
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    before = cases.tree(experts)
    out = ["-o", experts / "out"] if command == "compose" else []
    error = cases.refused(
        run(command, experts / "E1", *out, "--json"),
        3,
        "damaged.file",
        path,
        f"has {size // 2:,} bytes",
        f"its tensors need {size:,}",
        "damaged or incomplete; fetch or write it again",
    )
    assert (error["path"], error["found"]) == (str(path), size // 2)
    assert cases.tree(experts) == before


@pytest.mark.fault("F03")
def test_bytes_appended_to_the_second_expert(run, experts):
    path = experts / "E2" / WEIGHTS
    path.write_bytes(path.read_bytes() + bytes(16))
    cases.refused(
        run("compose", experts / "E1", experts / "E2", "-o", experts / "out", "--json"),
        3,
        "damaged.file",
        path,
        f"has {path.stat().st_size:,} bytes",
        f"need {path.stat().st_size - 16:,}",
    )
    assert not (experts / "out").exists()


@pytest.mark.fault("F01")
def test_any_length(run, experts):
    path = experts / "E1" / WEIGHTS
    data = path.read_bytes()
    for size in [0, 1, 7, 8, 9, *range(10, len(data), len(data) // 15), len(data) - 1]:
        path.write_bytes(data[:size])
        cases.refused(run("inspect", experts / "E1", "--json"), 3, "damaged.file", path, "bytes")


def test_half_a_config(run, experts):
    path = experts / "E1" / "adapter_config.json"
    path.write_bytes(path.read_bytes()[:40])
    cases.refused(run("inspect", experts / "E1", "--json"), 3, "damaged.json", path)
