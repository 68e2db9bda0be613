"""Rows: what every format becomes, what is refused, and which tokens carry the loss."""

import csv
import hashlib
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import train_support as support

from cgmerge.errors import Damaged, DataError, Incompatible, LimitExceeded, NotFound
from cgmerge.modules.data import (
    Encoded,
    Example,
    Message,
    begin_ids,
    encode,
    encode_all,
    end_ids,
    read_data,
    read_rows,
    render,
    rendering,
)

PLAIN = {"prompt": "copy : a =", "completion": "a"}
CHAT = {
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "U2"},
        {"role": "assistant", "content": "A2"},
    ]
}
SHARED = (Message("system", "S"), Message("user", "U1"))


@pytest.fixture
def write(tmp_path):
    def call(rows, name="data.jsonl"):
        return support.write_rows(tmp_path / name, rows)

    return call


class TestFormats:
    def test_prompt_and_completion(self, write):
        file = read_data(write([PLAIN, {**PLAIN, "skill": "copy", "id": 7}]))
        assert file.format == "prompt/completion"
        assert (file.rows, file.duplicates) == (2, 1)
        assert file.examples[0] == Example("copy : a =", "a", 1)
        assert dict(file.examples[1].extra) == {"skill": "copy", "id": 7}

    def test_every_assistant_turn_is_an_example(self, write):
        file = read_data(write([CHAT]))
        assert file.format == "messages"
        assert file.rows == 1
        assert [(e.prompt, e.completion) for e in file.examples] == [
            (SHARED, "A1"),
            ((*SHARED, Message("assistant", "A1"), Message("user", "U2")), "A2"),
        ]

    def test_sharegpt_names(self, write):
        turns = [{"from": "human", "value": "U1"}, {"from": "gpt", "value": "A1"}]
        file = read_data(write([{"conversations": turns, "system": "S"}]))
        assert file.format == "sharegpt"
        assert file.examples[0] == Example(SHARED, "A1", 1)

    def test_alpaca_with_its_rendered_text_column(self, write):
        row = {"instruction": "I", "input": "X", "output": "O", "text": "### …"}
        file = read_data(write([row, {**row, "input": ""}]))
        assert file.format == "alpaca"
        assert [e.prompt for e in file.examples] == [
            (Message("user", "I\n\nX"),),
            (Message("user", "I"),),
        ]
        assert dict(file.examples[0].extra) == {"text": "### …"}

    def test_alpaca_history_becomes_earlier_turns(self, write):
        row = {"instruction": "I", "output": "O", "system": "S", "history": [["Q", "R"]]}
        (example,) = read_data(write([row])).examples
        assert [(m.role, m.content) for m in example.prompt] == [
            ("system", "S"),
            ("user", "Q"),
            ("assistant", "R"),
            ("user", "I"),
        ]

    def test_text(self, write):
        (example,) = read_data(write([{"text": "all of it"}])).examples
        assert (example.prompt, example.completion) == (None, "all of it")

    def test_prompt_and_completion_as_messages(self, write):
        row = {
            "prompt": [{"role": "user", "content": "U"}],
            "completion": [{"role": "assistant", "content": "A"}],
        }
        (example,) = read_data(write([row])).examples
        assert example == Example((Message("user", "U"),), "A", 1)

    def test_empty_system_message_means_none(self, write):
        turns = [
            {"role": "system", "content": " "},
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": "A"},
        ]
        (example,) = read_data(write([{"messages": turns}])).examples
        assert example.prompt == (Message("user", "U"),)


class TestFiles:
    @pytest.mark.parametrize("name", ["d.json", "d.jsonl", "d.csv", "d.tsv", "d.parquet"])
    def test_same_rows_from_every_file_type(self, tmp_path, name):
        rows = [PLAIN, {"prompt": "copy : b =", "completion": 'b, "quoted"\nline'}]
        path = tmp_path / name
        if name == "d.json":
            path.write_text(json.dumps(rows, indent=1))
        elif name == "d.jsonl":
            support.write_rows(path, rows)
        elif name == "d.parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            with path.open("w", newline="") as handle:
                writer = csv.DictWriter(
                    handle, list(PLAIN), delimiter="\t" if name == "d.tsv" else ","
                )
                writer.writeheader()
                writer.writerows(rows)
        file = read_data(path)
        assert [(e.prompt, e.completion) for e in file.examples] == [
            (row["prompt"], row["completion"]) for row in rows
        ]

    def test_json_file_with_one_object_per_line(self, write):
        assert read_data(write([PLAIN, PLAIN], "lines.json")).rows == 2

    def test_excel_marks_and_semicolons(self, tmp_path):
        path = tmp_path / "excel.csv"
        path.write_bytes("\ufeffprompt;completion\r\na, b;c\r\n".encode())
        (example,) = read_data(path).examples
        assert (example.prompt, example.completion) == ("a, b", "c")

    def test_byte_order_mark_and_blank_lines(self, tmp_path):
        path = tmp_path / "d.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(PLAIN).encode() + b"\r\n\n\n")
        assert read_data(path).rows == 1

    def test_digest_is_of_the_bytes(self, write):
        import hashlib

        path = write([PLAIN])
        assert read_data(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()

    def test_missing_file_names_its_neighbours(self, write, tmp_path):
        write([PLAIN], "train.jsonl")
        with pytest.raises(NotFound, match="trian") as error:
            read_data(tmp_path / "trian.jsonl")
        assert "train.jsonl" in error.value.hint
        with pytest.raises(NotFound) as error:
            read_data(tmp_path / "no" / "x.jsonl")
        assert "does not exist" in error.value.hint

    def test_folder(self, write, tmp_path):
        write([PLAIN])
        with pytest.raises(NotFound, match="folder") as error:
            read_data(tmp_path)
        assert "data.jsonl" in error.value.hint


BAD_ROWS = {
    "empty prompt": ([{"prompt": "  ", "completion": "a"}], "empty", "row 1.*'prompt' is empty"),
    "empty completion": ([PLAIN, {**PLAIN, "completion": ""}], "empty", "row 2.*'completion'"),
    "number": ([{**PLAIN, "completion": 3}], "type", "must be a string, found a number"),
    "null": ([{**PLAIN, "completion": None}], "type", "found nothing"),
    "object": ([{**PLAIN, "completion": {}}], "type", "found an object"),
    "list and string": ([{**PLAIN, "prompt": ["a"]}], "type", "both be strings or both"),
    "no columns": ([{}], "format", "no known format"),
    "other columns": ([{"question": "q", "answer": "a"}], "format", "question, answer"),
    "half a format": (
        [{"prompt": "q", "answer": "a"}],
        "column",
        "row 1: the column 'completion' of prompt/completion rows is missing; found prompt, answer",
    ),
    "row without a column": (
        [PLAIN, {"prompt": "q", "id": 7}],
        "column",
        "row 2: the column 'completion' of prompt/completion rows is missing; found prompt, id",
    ),
    "row of other columns": (
        [PLAIN, {"id": 7}],
        "column",
        "row 2: the columns 'prompt', 'completion' of prompt/completion rows are missing; found id",
    ),
    "mixed": ([PLAIN, {"text": "x"}], "mixed", "row 1 is prompt/completion, row 2 is text"),
    "no messages": ([{"messages": []}], "type", "found an empty list"),
    "message without content": ([{"messages": [{"role": "user"}]}], "type", "found keys role"),
    "message as string": ([{"messages": ["hi"]}], "type", "found string"),
    "unknown role": ([{"messages": [{"role": "tool", "content": "x"}]}], "role", "'tool'"),
    "content parts": (
        [{"messages": [{"role": "user", "content": [{"type": "text"}]}]}],
        "type",
        "must hold a string, found a list",
    ),
    "empty answer": (
        [{"messages": [CHAT["messages"][1], {"role": "assistant", "content": ""}]}],
        "empty",
        "message 2",
    ),
    "assistant first": ([{"messages": [CHAT["messages"][2]]}], "role", "no user message before"),
    "no assistant": ([{"messages": CHAT["messages"][:2]}], "role", "no assistant message"),
    "history": (
        [{"instruction": "i", "output": "o", "history": ["q"]}],
        "type",
        "'history' must be",
    ),
    "nothing": ([], "empty_file", "holds no rows"),
}


class TestBadData:
    @pytest.mark.parametrize("name", BAD_ROWS)
    def test_bad_rows_are_named(self, write, name):
        rows, code, message = BAD_ROWS[name]
        with pytest.raises(DataError, match=message) as error:
            read_data(write(rows))
        assert error.value.code == f"data.{code}"
        assert error.value.exit_code == 3
        assert "data.jsonl" in error.value.message

    @pytest.mark.parametrize(
        ("line", "kind"),
        [
            (b'{"prompt": "a"', Damaged),
            (b'{"prompt": "a", "prompt": "b"}', Damaged),
            (b'{"prompt": NaN, "completion": "b"}', Damaged),
            (b'{"prompt": "\xff"}', Damaged),
            (b"[" * 100_000, LimitExceeded),
            (b"3", DataError),
        ],
    )
    def test_bad_json_names_the_line(self, tmp_path, line, kind):
        path = tmp_path / "d.jsonl"
        path.write_bytes(json.dumps(PLAIN).encode() + b"\n\n" + line + b"\n")
        with pytest.raises(kind, match="line 3"):
            read_data(path)

    def test_json_that_is_no_list(self, tmp_path):
        path = tmp_path / "d.json"
        path.write_text('"text"')
        with pytest.raises(DataError, match="array of objects"):
            read_data(path)
        path.write_text("[1]")
        with pytest.raises(DataError, match="row 1"):
            read_data(path)
        path.write_text(" \n")
        with pytest.raises(DataError, match="no rows"):
            read_data(path)

    @pytest.mark.parametrize(
        ("content", "kind", "message"),
        [
            (b"prompt,completion\na\n", DataError, "line 2: 1 cells, the header has 2"),
            (b"prompt,prompt\na,b\n", DataError, "two columns of one name"),
            (b"prompt,completion\n\xe4,b\n", DataError, "not UTF-8"),
            (b'prompt,completion\n"a"b,c\n', Damaged, "line 2"),
            (b"", DataError, "no rows"),
        ],
    )
    def test_bad_csv(self, tmp_path, content, kind, message):
        path = tmp_path / "d.csv"
        path.write_bytes(content)
        with pytest.raises(kind, match=message):
            read_data(path)

    def test_bad_parquet_and_unknown_suffix(self, tmp_path):
        path = tmp_path / "d.parquet"
        path.write_bytes(b"PAR1 and then nothing")
        with pytest.raises(Damaged, match="parquet"):
            read_data(path)
        other = tmp_path / "d.txt"
        other.write_text("x")
        with pytest.raises(DataError, match=r"known are \.json"):
            read_data(other)

    def test_a_pipe_does_not_hang(self, tmp_path):
        os.mkfifo(tmp_path / "p.jsonl")
        with pytest.raises(Exception, match="not a regular file"):
            read_data(tmp_path / "p.jsonl")


class TestTokens:
    def test_prompt_and_target_are_tokenized_apart(self):
        tokenizer = support.make_tokenizer()
        row = encode(Example("copy : a b =", "a b"), tokenizer)
        ids = tokenizer.convert_tokens_to_ids
        assert row.prompt_ids == ids(["copy", ":", "a", "b", "="])
        assert row.target_ids == ids(["a", "b", "<eos>"])
        assert len(row) == 8

    def test_end_token_that_is_there_is_not_doubled(self):
        tokenizer = support.make_tokenizer()
        assert encode(Example("a", "b <eos>"), tokenizer).target_ids[-2:] == [9, 1]

    def test_begin_token_where_the_tokenizer_adds_one(self):
        from tokenizers.processors import TemplateProcessing

        tokenizer = support.make_tokenizer(bos_token="<bos>")
        assert begin_ids(tokenizer) == []
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 3), ("<eos>", 1)]
        )
        assert begin_ids(tokenizer) == [3]
        assert encode(Example("a", "b"), tokenizer) == Encoded([3, 8], [9, 1])
        assert encode(Example(None, "a b"), tokenizer) == Encoded([3], [8, 9, 1])

    def test_text_is_learned_whole(self):
        assert encode(Example(None, "a b"), support.make_tokenizer()) == Encoded([], [8, 9, 1])

    def test_long_prompts_lose_their_left_and_targets_nothing(self):
        from tokenizers.processors import TemplateProcessing

        tokenizer = support.make_tokenizer(bos_token="<bos>")
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 3)]
        )
        row = encode(Example("a b c d", "e"), tokenizer, max_length=5)
        assert row == Encoded([3, 10, 11], [12, 1], cut=2)

    def test_targets_that_do_not_fit_are_counted(self):
        tokenizer = support.make_tokenizer()
        rows = [Example("a", "b"), Example("a", "b c d e", 2), Example("a", "b c d", 3)]
        with pytest.raises(DataError, match=r"2 of 3 rows .* 3 tokens.*row 2\) needs 5") as error:
            encode_all(rows, tokenizer, max_length=3)
        assert error.value.hint.startswith("--max-length 5")

    def test_no_end_token(self):
        tokenizer = support.make_tokenizer(eos_token=None)
        with pytest.raises(Incompatible, match="no end token"):
            encode(Example("a", "b"), tokenizer)

    def test_batch_and_single_agree(self):
        tokenizer = support.make_tokenizer()
        rows = [Example(row["prompt"], row["completion"]) for row in support.make_rows(9)]
        assert encode_all(rows, tokenizer) == [encode(row, tokenizer) for row in rows]
        assert encode_all([], tokenizer) == []


class TestChat:
    def test_template_gives_prompt_and_end_of_turn(self):
        tokenizer = support.make_byte_tokenizer(template=support.CHATML)
        example = Example(SHARED, "Hi")
        row = encode(example, tokenizer)
        assert rendering(tokenizer) == "chat template"
        text = tokenizer.decode(row.prompt_ids)
        assert text.endswith("<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n")
        # The line end after the end of turn is not learned: generation stops before it.
        assert tokenizer.decode(row.target_ids) == "Hi<|im_end|>"
        assert end_ids(tokenizer) == (1, 3)
        assert render(example, tokenizer) == f"{text}⟦Hi<|im_end|>⟧"

    def test_prompt_equals_what_generation_is_given(self):
        tokenizer = support.make_byte_tokenizer(template=support.CHATML)
        turns = [{"role": m.role, "content": m.content} for m in SHARED]
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True)
        assert encode(Example(SHARED, "Hi"), tokenizer).prompt_ids == list(
            asked["input_ids"] if hasattr(asked, "keys") else asked
        )

    def test_template_without_end_of_turn_gets_the_end_token(self):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        asks = template + "{% if add_generation_prompt %}assistant: {% endif %}"
        tokenizer = support.make_byte_tokenizer(template=asks)
        row = encode(Example((Message("user", "U"),), "A"), tokenizer)
        assert tokenizer.decode(row.target_ids) == "A\n<eos>"

    def test_template_that_asks_differently_keeps_the_asked_prompt(self):
        template = support.CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
        tokenizer = support.make_byte_tokenizer(template=template)
        row = encode(Example((Message("user", "U"),), "A"), tokenizer)
        assert tokenizer.decode(row.prompt_ids).endswith("<think>")
        assert tokenizer.decode(row.target_ids) == "A<|im_end|>"

    def test_template_that_refuses(self):
        template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(Incompatible, match="roles must alternate"):
            end_ids(support.make_byte_tokenizer(template=template))

    def test_template_that_refuses_one_row(self):
        refuse = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('no') }}"
        template = refuse + "{% endif %}{% endfor %}" + support.CHATML
        tokenizer = support.make_byte_tokenizer(template=template)
        rows = [Example((Message("user", text),), "A", row) for row, text in ((1, "ok"), (2, "no"))]
        with pytest.raises(DataError, match="row 2: the chat template refuses"):
            encode_all(rows, tokenizer)

    def test_template_that_drops_the_answer(self):
        tokenizer = support.make_byte_tokenizer(template="{{ messages[0].role }}")
        with pytest.raises(Incompatible, match="does not write"):
            end_ids(tokenizer)

    def test_no_template_role_marks(self):
        tokenizer = support.make_byte_tokenizer()
        assert rendering(tokenizer) == "role marks"
        row = encode(Example(SHARED, "A"), tokenizer)
        assert tokenizer.decode(row.prompt_ids) == (
            "### System:\nS\n\n### User:\nU1\n\n### Assistant:\n"
        )
        assert tokenizer.decode(row.target_ids) == "A<eos>"

    def test_no_template_and_no_words_for_marks(self):
        tokenizer = support.make_tokenizer()
        assert rendering(tokenizer) == "joined"
        row = encode(Example((Message("user", "copy : a ="),), "a"), tokenizer)
        assert row == encode(Example("copy : a =", "a"), tokenizer)


def test_render_marks_what_is_learned():
    assert render(Example("copy : a =", "a"), support.make_tokenizer()) == "copy : a = ⟦a <eos>⟧"
    assert render(Example(None, "a"), support.make_tokenizer()) == "⟦a <eos>⟧"


def test_rows_are_read_as_they_are_whatever_their_columns(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"b": [1, {"x": null}], "a": "ä"}\n\n{"c": 2}\n')
    rows, sha256 = read_rows(path)
    assert rows == [{"b": [1, {"x": None}], "a": "ä"}, {"c": 2}]
    assert list(rows[0]) == ["b", "a"]
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "e.csv").write_text("a,b\n1,x\n")
    assert read_rows(tmp_path / "e.csv")[0] == [{"a": "1", "b": "x"}]
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(path)
    with pytest.raises(NotFound, match="no such data file"):
        read_rows(tmp_path / "none.jsonl")
