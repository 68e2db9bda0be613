"""Hostile packages: sound things that are changed in one way each, and the command that meets them.

`PACKAGES` maps a name to a `Package`; each is built in a folder of its own, next to nothing else.
Compressed experts have theirs in tests/attacks.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import record_support
import support
import torch

WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "expert.json"
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
COMPOSE = ("compose", "e", "-m", "linear", "-o", "out")
ROUTE = ("inspect", "c")
LIST = ("compose", "lib/E1", "-m", "linear", "-o", "out")
RECIPE = ("compose", "r.yml", "-o", "out")
EVAL = ("eval", "--base", "tiny", "--dry-run", "--data")
REPORT = ("report", "r.json", "-o", "out.html")


@dataclass(frozen=True)
class Package:
    """What is built, what meets it, and how it is refused.

    Attributes:
        build: Fills a folder, given the folder of sound things.
        words: The command, run in that folder.
        code: The dotted code, and `status` its exit code.
    """

    build: Callable[[Path, Path], object]
    words: tuple[str, ...]
    code: str
    status: int = 3


def make_sound(folder, run):
    """Write the sound things: two experts, a composition, a library, a record."""
    shapes = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.1.self_attn.q_proj": (8, 8)}
    for seed in (1, 2):
        support.make_expert(folder / f"E{seed}", shapes, seed=seed)
    one, two = folder / "E1", folder / "E2"
    assert run("compose", one, two, "-m", "arrow", "-o", folder / "c", "-q")[0] == 0
    assert run("add", folder / "lib", one, "-q")[0] == 0
    record_support.write(folder / "r.json", {"base": {"s": "01"}, "x": {"s": "11"}})
    return folder


class Bomb:
    def __reduce__(self):
        return os.system, ("touch pwned",)


PACKAGES: dict[str, Package] = {}


def package(name, words, code, status=3):
    """Register what a function builds."""

    def keep(build):
        PACKAGES[name] = Package(build, words, code, status)
        return build

    return keep


def expert(name, code, change, status=3, words=COMPOSE):
    """An expert folder `e`, changed."""

    def build(folder, sound):
        shutil.copytree(sound / "E1", folder / "e")
        change(folder / "e")

    PACKAGES[f"expert-{name}"] = Package(build, words, code, status)


def config(name, code, status=3, text=None, **fields):
    """An expert folder whose adapter_config.json has other fields, or another text."""

    def change(place):
        if text is None:
            support.edit_config(place, **fields)
        else:
            data = text if isinstance(text, bytes) else text.encode()
            (place / CONFIG).write_bytes(data)

    expert(f"config-{name}", code, change, status)


def tensors(name, code, change, status=3):
    expert(f"weights-{name}", code, lambda place: support.edit_tensors(place, change), status)


EVIL = "(.*)*(.*)*(.*)*x"
PATTERN, VALUE, IMPORT = "unsafe.config_pattern", "damaged.config_value", "unsafe.config_import"
config("regex", PATTERN, target_modules=EVIL)
config("regex-in-list", PATTERN, target_modules=["q_proj", EVIL])
config("regex-excluded", PATTERN, exclude_modules=EVIL)
config("regex-layers", PATTERN, layers_pattern=[EVIL])
config("regex-ranks", PATTERN, rank_pattern={EVIL: 4})
config("regex-alphas", PATTERN, alpha_pattern={EVIL: 4})
config("targets-numbers", PATTERN, target_modules=[1, 2])
config("rank-huge", "limit.rank", 4, r=100_000_000)
config("rank-in-pattern", "limit.rank", 4, rank_pattern={"q_proj": 1025})
config("rank-float", VALUE, r=4.0)
config("rank-text", VALUE, r="4")
config("rank-true", VALUE, r=True)
config("rank-zero", VALUE, r=0)
config("rank-negative", VALUE, r=-4)
config("rank-other", "incompatible.rank", r=5)
config("ranks-list", VALUE, rank_pattern=[1])
config("alpha-nan", "damaged.json", text='{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}')
config("alpha-endless", "damaged.json", text='{"peft_type": "LORA", "lora_alpha": Infinity}')
config("alpha-out-of-range", "damaged.json", text='{"peft_type": "LORA", "lora_alpha": 1e999}')
config("alpha-huge", VALUE, lora_alpha=1e30)
config("alpha-zero", VALUE, lora_alpha=0)
config("alpha-negative", VALUE, lora_alpha=-8)
config("alpha-text", VALUE, lora_alpha="8")
config("replication", "incompatible.config_layer_replication", layer_replication=[[0, 20_000]] * 9)
config("pissa", "unsafe.config_init", init_lora_weights="pissa_niter_16")
config("olora", "unsafe.config_init", init_lora_weights="olora")
config("loftq", "unsafe.config_init", init_lora_weights="loftq")
config("corda", "unsafe.config_init", init_lora_weights="corda")
config("bias", "incompatible.config_bias", bias="all")
config("megatron", "incompatible.config_megatron_config", megatron_config={"x": 1})
config("megatron-import", IMPORT, megatron_core="evil_module")
config("auto-import", IMPORT, auto_mapping={"parent_library": "evil_module"})
config("auto-text", IMPORT, auto_mapping="evil_module")
config("type-unknown", "incompatible.peft_type", peft_type="EVIL")
config("type-list", "incompatible.peft_type", peft_type=["LORA"])
config("type-missing", "incompatible.peft_type", text="{}")
config("dora", "incompatible.config_use_dora", use_dora=True)
config("lora-bias", "incompatible.config_lora_bias", lora_bias=True)
config("saved-modules", "incompatible.config_modules_to_save", modules_to_save=["lm_head"])
config("tokens", "incompatible.config_trainable_token_indices", trainable_token_indices=[1])
config("parameters", "incompatible.config_target_parameters", target_parameters=["mlp.experts"])
config("invocation", "incompatible.config_alora_invocation_tokens", alora_invocation_tokens=[1])
config("router", "incompatible.config_arrow_config", arrow_config={"top_k": 1})
config("unknown", "incompatible.config_unknown_field", evil={"k": 1})
config("flag-text", VALUE, use_rslora="yes")
config("transposed-number", VALUE, fan_in_fan_out=1)
config("name-of-lines", VALUE, base_model_name_or_path="x\n\x1b[2J")
config("name-of-megabytes", VALUE, task_type="x" * 500_000)
config("layers-text", VALUE, layers_to_transform="all")
config("targets-elsewhere", "incompatible.config_targets", target_modules=["v_proj"])
config("twice", "damaged.json", text='{"peft_type": "LORA", "r": 4, "r": 400000000}')
config("nested", "limit.json_depth", 4, text='{"a":' * 100_000 + "1" + "}" * 100_000)
config("digits", "damaged.json", text='{"r": ' + "9" * 5000 + "}")
config("mark", "damaged.json", text=b'\xef\xbb\xbf{"peft_type": "LORA"}')
config("other-letters", "damaged.json", text='{"peft_type": "LORA"}'.encode("utf-16"))
config("surrogate", "damaged.json", text='{"peft_type": "LORA", "k": "\\ud800"}')
config("long", "limit.file_size", 4, text="{" + '"a":1,' * 400_000 + '"b":1}')
config("list", "damaged.json", text="[]")

tensors("full", "unsafe.full_weights", lambda t: {**t, "model.embed_tokens.weight": torch.ones(4)})
tensors("unknown", "unsafe.full_weights", lambda t: {**t, "foo.bar": torch.ones(2)})
tensors("nan", "damaged.not_finite", lambda t: {n: v * float("nan") for n, v in t.items()})
tensors("endless", "damaged.not_finite", lambda t: {n: v * float("inf") for n, v in t.items()})
tensors("integers", "incompatible.dtype", lambda t: {n: v.to(torch.int8) for n, v in t.items()})
tensors("cubes", "incompatible.dtype", lambda t: {n: v[None] for n, v in t.items()})
tensors("empty", "damaged.empty", lambda t: {})
tensors("no-prefix", "incompatible.names", lambda t: {n[17:]: v for n, v in t.items()})
tensors("half", "damaged.pair", lambda t: {n: v for n, v in t.items() if "lora_A" in n})
tensors("dora", "incompatible.dora", lambda t: {**t, f"{PREFIX}.lora_magnitude_vector": t[
    f"{PREFIX}.lora_B.weight"][0].clone()})  # fmt: skip
tensors("path", "incompatible.names", lambda t: {n.replace("model.layers", "../../x"): v
    for n, v in t.items()})  # fmt: skip
tensors("zeros", "incompatible.no_effect", lambda t: {n: v * 0 for n, v in t.items()})


def header(text, body=b""):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(data).to_bytes(8, "little") + data + body


def raw(name, code, data, status=3):
    expert(f"file-{name}", code, lambda place: (place / WEIGHTS).write_bytes(data()), status)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
raw("nothing", "damaged.file", lambda: b"")
raw("text", "damaged.file", lambda: b"<html>not found</html>")
raw("header-of-exabytes", "damaged.file", lambda: (2**63).to_bytes(8, "little") + b"{}")
raw("tensor-of-exabytes", "damaged.file", lambda: header({"x": {**ENTRY, "shape": [2**61] * 3}}))
raw("axes", "damaged.file", lambda: header({"x": {**ENTRY, "shape": [0] * 400_000}}))
raw("overlap", "damaged.file", lambda: header({"x": ENTRY, "y": ENTRY}, bytes(4)))
raw("tail", "damaged.file", lambda: header({"x": ENTRY}, bytes(400)))
raw("keys-twice", "damaged.json", lambda: header(b'{"x":1,"x":2}'))
raw("many", "limit.tensors", lambda: header({str(i): {**ENTRY, "shape": [0], "data_offsets": [0, 0]}
    for i in range(25_000)}), 4)  # fmt: skip
raw("long-header", "limit.header_size", lambda: header(b"{" + b" " * (5 << 20) + b"}"), 4)


def swapped(name):
    """Replace a part of the expert by something that is no file of it."""

    def pipe(place):
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)

    def link(place):
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to("/etc/passwd")

    return {"pipe": pipe, "link": link}


for _part in (WEIGHTS, CONFIG, CARD):
    for _kind, _change in swapped(_part).items():
        expert(f"{_kind}-{_part.partition('.')[0]}", "unsafe.not_regular", _change)


def unpickled(name):
    def change(place):
        (place / WEIGHTS).unlink()
        (place / name).write_bytes(pickle.dumps(Bomb()))

    return change


for _name in ("adapter_model.bin", "adapter_model.pt", "model.bin"):
    expert(f"pickle-{_name}", "unsafe.pickle", unpickled(_name))


def card(name, code, **fields):
    content = {"schema": "cgmerge.expert/1", "skill": "x", "base": {"name": "b"}, **fields}
    text = json.dumps(content)
    expert(f"card-{name}", code, lambda place: (place / CARD).write_text(text))


card("path", "damaged.card", files={"../../x": "00"})
card("absent", "damaged.file_missing", files={"nobody.json": "00"})
card("digest", "damaged.digest", files={CONFIG: "00" * 32})
card("newer", "incompatible.card_schema", schema="cgmerge.expert/9")
card("field", "damaged.card", evil=1)
card("terminal", "damaged.card", skill="x\x1b[2J\nhint: pay")
card("types", "damaged.card", base="b")


def routed(name, code, change, status=3):
    """A routed composition `c` whose record is changed."""

    def build(folder, sound):
        shutil.copytree(sound / "c", folder / "c")
        path = folder / "c" / "cgmerge.json"
        content = json.loads(path.read_text())
        done = change(content, folder / "c")
        path.write_text(json.dumps(content if done is None else done))

    PACKAGES[f"composition-{name}"] = Package(build, ROUTE, code, status)


def put(*keys, value):
    """Set a value deep in a record."""

    def change(content, _folder):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def relinked(content, folder):
    (folder / "experts" / "E1").rename(folder.parent / "elsewhere")
    (folder / "experts" / "E1").symlink_to(folder.parent / "elsewhere")


def flipped(content, folder):
    data = bytearray((folder / "router.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "router.safetensors").write_bytes(bytes(data))


routed("newer", "incompatible.composition_schema", put("schema", value="cgmerge.routed/9"))
routed("name-outside", "damaged.composition", put("experts", 0, "name", value="../../x"))
routed("path-outside", "damaged.composition", put("experts", 0, "path", value="/etc"))
routed("no-experts", "damaged.composition", put("experts", value=[]))
routed("experts-text", "damaged.composition", put("experts", value="E1"))
routed("digest", "damaged.digest", put("experts", 0, "sha256", value="0" * 64))
routed("kind-import", "damaged.router", put("router", "kind", value="os.system"))
routed("kind-list", "damaged.router", put("router", "kind", value=["token"]))
routed("settings", "damaged.router", put("router", "settings", value={"evil": 1}))
routed("router-digest", "damaged.digest", flipped)
routed("unknown", "damaged.composition", put("evil", value=1))
routed("base", "damaged.composition", put("base", value="x"))
routed("method", "damaged.composition", put("method", value=["x"]))
routed("link", "damaged.file_missing", relinked)


def library(name, code, change, status=3):
    """A library `lib` whose entry of E1, or another file, is changed."""

    def build(folder, sound):
        shutil.copytree(sound / "lib", folder / "lib")
        path = folder / "lib" / "entries" / "e1.json"
        content = json.loads(path.read_text())
        done = change(content, folder / "lib")
        path.write_text(json.dumps(content if done is None else done))

    PACKAGES[f"library-{name}"] = Package(build, LIST, code, status)


def object_link(content, lib):
    place = lib / "objects" / content["digest"]
    place.rename(lib.parent / "elsewhere")
    place.symlink_to(lib.parent / "elsewhere")


def file_link(content, lib):
    path = lib / "objects" / content["digest"] / WEIGHTS
    path.rename(lib.parent / "elsewhere")
    path.symlink_to(lib.parent / "elsewhere")


def file_changed(content, lib):
    path = lib / "objects" / content["digest"] / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def marked_newer(content, lib):
    (lib / "cgmerge-library.json").write_text('{"schema": "cgmerge.library/9"}')


library("name", "unsafe.entry_name", put("name", value="../../x"))
library("file", "unsafe.entry_name", put("files", value={"../../secret": ["0" * 64, 1]}))
library("digest", "damaged.entry_digest", put("digest", value="0" * 64))
library("newer-entry", "incompatible.entry_schema", put("schema", value="cgmerge.entry/9"))
library("newer", "incompatible.library", marked_newer)
library("long", "unsafe.entry_size", put("skill", value="x" * 70_000))
library("object-link", "unsafe.link", object_link)
library("file-link", "damaged.object", file_link)
library("file-changed", "damaged.digest", file_changed)


def recipe(name, code, text, status=2):
    def build(folder, sound):
        shutil.copytree(sound / "E1", folder / "E1")
        (folder / "r.yml").write_text(text)

    PACKAGES[f"recipe-{name}"] = Package(build, RECIPE, code, status)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
recipe("laughs", "usage.recipe", LAUGHS)
recipe("object", "usage.recipe", "!!python/object/apply:os.system ['touch pwned']")
recipe("nested", "usage.recipe", "experts: " + "[" * 100_000)
recipe("twice", "usage.recipe", "experts: [E1]\nexperts: [E1]")
recipe("absolute", "not_found.not_folder", "experts: [/etc/passwd]")
recipe("outside", "not_found.folder", "experts: [../../../nowhere]")
recipe("scheme", "usage.ref", "experts: ['evil://x/y']")
recipe("method", "usage.method", "experts: [E1]\nmethod: os.system")
recipe("weight", "usage.weight", "experts: [{ref: E1, weight: .nan}]")
recipe("digits", "usage.recipe", "experts: [{ref: E1, weight: " + "9" * 5000 + "}]")
recipe("digest", "damaged.digest", "experts: [{ref: E1, sha256: '00'}]", 3)
recipe("parameter", "usage.parameter", "experts: [E1]\nparams: {density: 1e30}")
recipe("rank", "usage.rank", "experts: [E1]\noutput: {rank: 99999999999999}")
recipe("unknown", "usage.recipe", "experts: [E1]\ntrust_remote_code: true")
MERGEKIT = "merge_method: {}\nbase_model: E1\nmodels: [{{model: E1, parameters: {{weight: {}}}}}]\n"
recipe("mergekit-method", "usage.mergekit", MERGEKIT.format("os.system", 1))
recipe("mergekit-object", "usage.recipe", MERGEKIT.format("!!python/name:os.system", 1))
recipe("mergekit-weight", "usage.mergekit", MERGEKIT.format("ties", ".inf"))
recipe("mergekit-code", "usage.mergekit", MERGEKIT.format("ties", 1) + "trust_remote_code: true\n")
recipe("mergekit-slices", "usage.mergekit", "merge_method: ties\nslices: [{sources: []}]\n")
recipe("mergekit-deep", "usage.recipe", MERGEKIT.format("ties", "[" * 50_000))


def data(name, code, content, status=3, file="d.jsonl"):
    def build(folder, sound):
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    PACKAGES[f"data-{name}"] = Package(build, (*EVAL, file), code, status)


ROW = '{"prompt": "a", "completion": "b"}\n'
data("nested", "limit.json_depth", ROW + "[" * 100_000, 4)
data("nan", "damaged.json", ROW + '{"prompt": NaN, "completion": "b"}')
data("twice", "damaged.json", '{"prompt": "a", "prompt": "b", "completion": "c"}')
data("binary", "damaged.json", b"\x80\x04" + pickle.dumps(Bomb()))
data("pickle", "data.suffix", pickle.dumps(Bomb()), file="d.pkl")
data("types", "data.type", '{"prompt": {"$ref": "/etc/passwd"}, "completion": "b"}')
data("parquet", "damaged.parquet", b"PAR1 and then nothing PAR1", file="d.parquet")
data("csv", "damaged.csv", 'prompt,completion\n"a"b,c\n', file="d.csv")
data("surrogate", "damaged.json", '{"prompt": "\\ud800", "completion": "b"}')
data("nothing", "data.empty_file", "")


@package("data-pipe", (*EVAL, "d.jsonl"), "unsafe.not_regular")
def data_pipe(folder, sound):
    os.mkfifo(folder / "d.jsonl")


def record(name, code, change, status=3):
    """A record `r.json` that is changed; its items stand beside it."""

    def build(folder, sound):
        for path in sound.glob("r*.json*"):
            shutil.copy(path, folder)
        path = folder / "r.json"
        content = json.loads(path.read_text())
        done = change(content, folder)
        path.write_text(done if isinstance(done, str) else json.dumps(content))

    PACKAGES[f"record-{name}"] = Package(build, REPORT, code, status)


def items_changed(content, folder):
    (path,) = folder.glob("r.items*")
    path.write_bytes(path.read_bytes().replace(b"true", b"false", 1))


def items_link(content, folder):
    (path,) = folder.glob("r.items*")
    path.unlink()
    path.symlink_to("/etc/passwd")


record("newer", "damaged.record", put("schema", value="cgmerge.record/99"))
record("field", "damaged.record", put("evil", value=1))
record("nan", "damaged.json", lambda *_: '{"schema": NaN}')
record("nested", "limit.json_depth", lambda *_: "[" * 100_000, 4)
record("items-changed", "damaged.items", items_changed)
record("items-link", "unsafe.not_regular", items_link)
record("targets", "damaged.record", put("targets", value="x"))
record("names", "damaged.record", put("targets", 0, "kind", value="friend"))
