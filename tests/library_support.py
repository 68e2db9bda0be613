"""Experts for the tests of libraries, admitted once and renamed as needed."""

from dataclasses import replace

import support

from cgmerge.modules.library.admit import Item, admit


def named(item, name):
    """The same expert under another name."""
    return Item(replace(item.entry, name=name), item.sources)


def make_items(folder, count=3):
    """Experts e0, e1, … of different content, with their entries."""
    shapes = support.pick(support.llama_shapes(), "q_proj")
    for seed in range(count):
        support.make_expert(folder / f"e{seed}", shapes, seed=seed + 1, rank=2)
    return [admit(str(folder / f"e{seed}")) for seed in range(count)]


def tree(folder):
    """Every file below a folder, by its path, with its content; temporaries too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def check_sound(store):
    """Every entry is readable and all its files are what it says; no temporary is left."""
    from cgmerge.modules.library.check import Checked, verify

    checked = Checked()
    verify(store.url, checked)
    assert checked.damages == []
    return checked
