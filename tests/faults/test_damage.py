"""Damage that is more than one bit: bursts, sectors, swapped blocks; archives; changed experts."""

import io
import random
import tarfile
import zipfile

import case_support as cases
import pytest
import support
from cge_samples import FIELDS, coded

from cgmerge.errors import InputError
from cgmerge.modules.base import open_base
from cgmerge.modules.card import BaseId, ExpertCard, write_card
from cgmerge.modules.compress.container import CgeFile, write_cge
from cgmerge.modules.expert import open_expert

WEIGHTS = "adapter_model.safetensors"


def bursts(raw, count, seed=0):
    """Files in which 2 to 32 bits in a row are other than they were."""
    rng = random.Random(seed)
    for _ in range(count):
        first, bits = rng.randrange(8 * len(raw) - 32), rng.randint(2, 32)
        changed = bytearray(raw)
        mask = rng.getrandbits(bits) | 1 | 1 << bits - 1
        for bit in range(bits):
            if mask >> bit & 1:
                changed[(first + bit) // 8] ^= 1 << (first + bit) % 8
        yield bytes(changed)


def sectors(raw, size):
    """Files in which one sector is zeroed, or two are swapped."""
    count = len(raw) // size
    for place in range(count):
        part = slice(place * size, (place + 1) * size)
        if any(raw[part]):
            yield raw[: part.start] + bytes(size) + raw[part.stop :]
    for one in range(count - 1):
        a, b = raw[one * size : (one + 1) * size], raw[(one + 1) * size : (one + 2) * size]
        if a != b:
            yield raw[: one * size] + b + a + raw[(one + 2) * size :]


@pytest.mark.fault("F02")
@pytest.mark.parametrize("kind", ["bursts", "512", "4096"])
def test_bursts_and_sectors_of_compressed_experts(tmp_path, kind):
    path = tmp_path / "x.cge"
    write_cge(path, [coded("a", 200, 500, seed=3), coded("b", 60, 300, spread=2.0)], {}, FIELDS)
    raw = path.read_bytes()
    assert len(raw) > 3 * 4096
    damaged = list(bursts(raw, 200) if kind == "bursts" else sectors(raw, int(kind)))
    assert len(damaged) > 4
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(InputError), CgeFile.open(path) as file:
            file.verify()


@pytest.mark.fault("F02", "F15")
@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json"])
def test_any_change_of_an_expert_with_a_card(tmp_path, models, qv, name):
    """Its card holds the digests of its files: a change is seen when it is opened."""
    folder = support.make_expert(tmp_path / "e", qv)
    base = BaseId(name="org/B", fingerprint=open_base(str(models / "B")).fingerprint)
    write_card(folder, ExpertCard(skill="e", base=base))
    path = folder / name
    raw = path.read_bytes()
    rng = random.Random(1)
    for data in (
        *bursts(raw, 60),
        *(raw[:i] + bytes([raw[i] ^ 1 << rng.randrange(8)]) + raw[i + 1 :]
          for i in rng.sample(range(len(raw)), 60)),
    ):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(InputError):
            open_expert(str(folder))
    path.write_bytes(raw)
    open_expert(str(folder)).file.close()


@pytest.mark.fault("F15")
def test_a_file_that_was_added_or_removed(run, tmp_path, models, qv):
    """What the card lists must be there; what it does not list is never read."""
    folder = support.make_expert(tmp_path / "e", qv)
    write_card(folder, ExpertCard(skill="e", base=BaseId(name="org/B")))
    cases.done(run("compose", folder, "-m", "linear", "-o", tmp_path / "a", "--json"))
    (folder / "modeling_evil.py").write_text("raise SystemExit(99)\n")
    cases.done(run("compose", folder, "-m", "linear", "-o", tmp_path / "b", "--json"))
    assert support.folder_bytes(tmp_path / "a") == support.folder_bytes(tmp_path / "b")
    (folder / WEIGHTS).unlink()
    words = ("compose", folder, "-m", "linear", "-o", tmp_path / "c", "--json")
    assert run(*words)[0] in (2, 3)
    assert not (tmp_path / "c").exists()


def tar_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zip_of(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.fault("F13")
@pytest.mark.parametrize("make", [zip_of, tar_of])
@pytest.mark.parametrize("name", ["e.zip", "e.tar", "e.cge", "e/expert.cge", f"e/{WEIGHTS}"])
def test_archives_are_never_unpacked(run, experts, monkeypatch, make, name):
    """Members that lead out of the folder, and one of 30 MB of zeros, stay where they are."""
    monkeypatch.chdir(experts)
    members = [("../pwned", b"x"), ("/tmp/cgmerge-pwned", b"x"), ("zeros", bytes(30 << 20))]
    path = experts / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(make(members))
    if name.endswith(WEIGHTS):
        (path.parent / "adapter_config.json").write_bytes(
            (experts / "E1" / "adapter_config.json").read_bytes()
        )
    before = cases.tree(experts)
    for words in (["inspect", "e" if "/" in name else name], ["add", "lib"]):
        target = [] if words[0] == "inspect" else ["e" if "/" in name else name]
        code, out, err = run(*words, *target, "--json")
        assert (code, out) == ((2 if name in ("e.zip", "e.tar") else 3), ""), err
        assert "Traceback" not in err
    assert cases.tree(experts) == before
    assert not (experts.parent / "pwned").exists()


@pytest.mark.fault("F12")
def test_a_hard_link_is_the_file_itself(run, experts):
    path = experts / "E1" / WEIGHTS
    path.unlink()
    path.hardlink_to(experts / "E2" / WEIGHTS)
    found = cases.done(run("inspect", experts / "E1", "--json"))
    assert found["norm"] == cases.done(run("inspect", experts / "E2", "--json"))["norm"]


@pytest.mark.fault("F14")
def test_inspect_says_what_is_unusual(run, experts, models):
    assert cases.done(run("inspect", experts / "E1", "--json"))["unusual"] == []

    def one_direction(tensors):
        name = next(n for n in tensors if "layers.1" in n and "q_proj.lora_B" in n)
        strong = tensors[name].clone()
        strong[:, 0] *= 1000
        return {**tensors, name: strong}

    support.edit_tensors(experts / "E1", one_direction)
    found = cases.done(run("inspect", experts / "E1", "--json"))["unusual"]
    assert any("layers.1.self_attn.q_proj: one direction" in note for note in found)
    assert "unusual" in run("inspect", experts / "E1")[1]
    notes = cases.done(run("inspect", experts / "E1", experts / "E2", "--json"))["notes"]
    assert any(note.startswith("E1: unusual: ") for note in notes)
    # Together: how much of the sum is whose.
    words = ("compose", experts / "E1", f"{experts / 'E2'}=-1", "-m", "linear", "--json")
    shares = cases.done(run(*words, "-o", experts / "out"))["shares"]
    assert shares[0] > 0.95
    assert sum(shares) == pytest.approx(1)
