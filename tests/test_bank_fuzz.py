"""Nothing but a file that `Bank.save` wrote is read: damaged files, forged ones, other formats."""

import json
import pickle
import random
import sys
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch
from sealed import encoded, file_bytes, forged, make_bank, refused, split

import bnuq_ext as bnuq
from bnuq_ext import bank_file

# What json says of brackets in brackets.
TOO_DEEP = "Stack overflow" if sys.version_info >= (3, 14) else "maximum recursion depth"

# ---- damage ------------------------------------------------------------------------------------


@pytest.fixture
def sample(tmp_path):
    return file_bytes(make_bank(), tmp_path / "sample")


def test_every_bit_flipped(sample):
    damaged = bytearray(sample)
    for bit in range(8 * len(sample)):
        damaged[bit // 8] ^= 1 << bit % 8
        assert refused(bytes(damaged)), f"bit {bit} of {8 * len(sample)}"
        damaged[bit // 8] ^= 1 << bit % 8
    assert refused(bytes(damaged)) is None


def test_every_truncation_and_every_zeroed_block(sample):
    for length in range(len(sample)):
        assert refused(sample[:length]), length
    for size in (1, 8, 64, 512):
        for start in range(0, len(sample), max(1, size // 4)):
            zeroed = (
                sample[:start] + bytes(len(sample[start : start + size])) + sample[start + size :]
            )
            assert refused(zeroed) or zeroed == sample, (start, size)


def test_random_damage(sample):
    """Bytes replaced, inserted, removed, moved; none of 10,000 is read (below 7e-4 at 99.9 %)."""
    rng = random.Random(0)
    cases = 0
    while cases < 10_000:
        damaged = bytearray(sample)
        for _ in range(rng.choice((1, 1, 2, 5, 50))):
            i, j = sorted(rng.randrange(len(damaged) + 1) for _ in range(2))
            j = min(j, i + rng.choice((1, 4, 8, 100)))
            damaged[i:j] = rng.choice(
                (rng.randbytes(j - i), b"", rng.randbytes(3), damaged[: j - i], damaged[i:j] * 2)
            )
        if damaged != sample:
            cases += 1
            assert refused(bytes(damaged)), damaged


def test_trailing_bytes(sample):
    size = len(sample)
    for extra in (b"\0", b" ", sample):
        message = refused(sample + extra)
        assert f"hold {size} bytes as its header says, got {size + len(extra)}" in message


# ---- files made on purpose ---------------------------------------------------------------------


def change_field(name, value):
    return lambda header, body: (header["__metadata__"].update({name: value}), body)[1]


def change_entry(name, **change):
    return lambda header, body: (header[name].update(change), body)[1]


def rename(old, new):
    def change(header, body):
        entries = {new if name == old else name: entry for name, entry in header.items()}
        header.clear()
        header.update(entries)
        return body

    return change


def put_number(name, value, kind=torch.float32):
    def change(header, body):
        start = header[name]["data_offsets"][0]
        number = torch.tensor([value], dtype=kind).numpy().tobytes()
        return body[:start] + number + body[start + len(number) :]

    return change


def pop_field(header, body):
    del header["__metadata__"]["unused"]
    return body


def turn_fields(header, body):
    header["__metadata__"] = dict(reversed(header["__metadata__"].items()))
    return body


def without_slashes(header, body):
    for group in ("count", "mean", "var"):
        rename(f"{group}/layer0.bn", group)(header, body)
    return body


def pop_last_entry(header, body):
    return body[: header.pop("var/layer1.bn")["data_offsets"][0]]


def text_for_entry(header, body):
    header["var/layer1.bn"] = "F32"
    return body


def claim_20_gigabytes(header, body):
    entry = header["var/layer1.bn"]
    start = entry["data_offsets"][0]
    entry.update(shape=[10**9, 5], data_offsets=[start, start + 20 * 10**9])
    return body


NAN, INF = float("nan"), float("inf")
MADE_ON_PURPOSE = {
    "newer": (
        change_field("version", "2"),
        "have version 1 (a newer one needs a newer bnuq_ext), got '2'",
    ),
    "format": (change_field("format", "pt"), "state the format 'bnuq_bank', got another or none"),
    "number for text": (
        change_field("batch_size", 8),
        "have a header of text fields with a SHA-256",
    ),
    "M": (
        change_field("batch_size", "0"),
        "hold a bank, got Bank: batch_size must be at least 1, got 0",
    ),
    "no number": (change_field("batch_size", "x"), "hold a bank, got invalid literal for int()"),
    "N": (
        change_field("dataset_size", "7"),
        "hold a bank, got Bank: dataset_size must be at least 8",
    ),
    "disjoint": (
        change_field("disjoint", "nan"),
        "hold a bank, got Bank: disjoint must lie in [0, 1]",
    ),
    "unused": (change_field("unused", "3"), "got Bank: unused must be names of layers, in"),
    "unused names": (
        change_field("unused", "[3]"),
        "hold a bank, got Bank: unused must be names of",
    ),
    "metadata": (
        change_field("metadata", "[]"),
        "hold a bank, got Bank: metadata must be a dict of",
    ),
    "a number with a blank": (change_field("batch_size", " 8"), "got fields {'batch_size': ' 8'}"),
    "a number with a line": (change_field("batch_size", "0_8"), "got fields {'batch_size': '0_8'}"),
    "a share with zeros": (change_field("disjoint", "1.00"), "got fields {'disjoint': '1.00'}"),
    "metadata with a blank": (change_field("metadata", "{ }"), "got fields {'metadata': '{ }'}"),
    "nested metadata": (
        change_field("metadata", "[" * 10**5),
        f"hold a bank, got {TOO_DEEP}",
    ),
    "further field": (change_field("more", ""), "hold a bank, got fields ['format', 'version',"),
    "fields in another order": (turn_fields, "hold a bank, got fields ['metadata', 'unused',"),
    "missing field": (pop_field, "hold a bank, got fields ['format', 'version',"),
    "NaN": (
        put_number("mean/layer0.bn", NAN),
        "got Bank: mean['layer0.bn'] must be finite, got NaN",
    ),
    "infinity": (
        put_number("var/layer1.bn", INF),
        "got Bank: var['layer1.bn'] must be finite, got NaN",
    ),
    "negative": (
        put_number("var/layer1.bn", -0.25),
        "Bank: var['layer1.bn'] must be at least 0, got -0.25",
    ),
    "count": (
        put_number("count/layer1.bn", 1, torch.int64),
        "hold a bank, got Bank: count['layer1.bn'] must be at least 2, got 1",
    ),
    "missing tensor": (pop_last_entry, "hold a bank, got Bank: var must have the keys of mean"),
    "layer name": (
        rename("var/layer1.bn", "var/layer9.bn"),
        "Bank: var must have the keys of mean",
    ),
    "group": (
        rename("var/layer1.bn", "std/layer1.bn"),
        "hold a bank, got a tensor called 'std/layer1.bn'",
    ),
    "no group": (
        rename("var/layer1.bn", "layer1.bn"),
        "hold a bank, got a tensor called 'layer1.bn'",
    ),
    "groups alone": (without_slashes, "hold a bank, got a tensor called 'count'"),
    "entry": (text_for_entry, "have dtype, shape and data_offsets for 'var/layer1.bn', got F32"),
    "dtype": (
        change_entry("var/layer1.bn", dtype="BF16"),
        "have one of the dtypes F32, F64, I64 for",
    ),
    "list": (
        change_entry("var/layer1.bn", dtype=["F32"]),
        "have one of the dtypes F32, F64, I64 for",
    ),
    "integers": (
        change_entry("count/layer0.bn", dtype="F64"),
        "hold a bank, got Bank: count['layer0.bn'] must be int64, got torch.float64",
    ),
    "float64": (
        change_entry("var/layer1.bn", dtype="F64", shape=[2, 5]),
        "hold a bank, got Bank: var['layer1.bn'] must have shape [4, 5], got [2, 5]",
    ),
    "order": (
        change_entry("var/layer1.bn", shape=[5, 4]),
        "Bank: var['layer1.bn'] must have shape [4, 5]",
    ),
    "flat": (
        change_entry("mean/layer0.bn", shape=[12]),
        "Bank: mean['layer0.bn'] must have shape (B, C)",
    ),
    "zero": (
        change_entry("mean/layer0.bn", shape=[0, 3]),
        "have a shape of one or two positive integers",
    ),
    "float shape": (
        change_entry("mean/layer0.bn", shape=[4.0, 3]),
        "have a shape of one or two positive",
    ),
    "true": (
        change_entry("mean/layer0.bn", shape=[12, True]),
        "have a shape of one or two positive",
    ),
    "three": (
        change_entry("mean/layer0.bn", shape=[1, 4, 3]),
        "have a shape of one or two positive",
    ),
    "no list": (change_entry("mean/layer0.bn", shape="12"), "have a shape of one or two positive"),
    "huge": (change_entry("var/layer1.bn", shape=[10**9, 10**9]), "have 'var/layer1.bn' at bytes"),
    "huge and fitting": (claim_20_gigabytes, "bytes as its header says, got "),
    "another beginning": (
        change_entry("count/layer0.bn", data_offsets=[8, 32]),
        "have 'count/layer0.bn' at bytes 0 to 32, got [8, 32]",
    ),
    "overlap": (
        change_entry("var/layer1.bn", data_offsets=[0, 80]),
        "have 'var/layer1.bn' at bytes",
    ),
}


@pytest.mark.parametrize("length", range(8))
def test_headers_are_padded_to_eight_bytes_and_no_more(length, tmp_path):
    data = file_bytes(make_bank(metadata={"a": "x" * length}), tmp_path / "a.bank")
    assert forged(*split(data)) == data


def test_refuses_more_spaces_behind_the_header(sample):
    length = int.from_bytes(sample[:8], "little")
    message = refused(forged(sample[8 : 8 + length] + b" " * 8, sample[8 + length :]))
    assert "have its header in canonical form" in message


@pytest.mark.parametrize("name", MADE_ON_PURPOSE)
def test_refuses_sealed_files_of_other_content(sample, name):
    """Each with the SHA-256 of its content: what is found here is found by the schema."""
    change, text = MADE_ON_PURPOSE[name]
    header, body = split(sample)
    body = change(header, body)
    message = refused(forged(header, body, seal=True))
    assert message and text in message, message


RAW = {
    "empty": (b"", "hold at least 8 bytes, got 0"),
    "seven bytes": (b"1234567", "hold at least 8 bytes, got 7"),
    "no header": (bytes(8), "have a header of 1 to 0 bytes, got 0"),
    "huge header": (
        b"\xff" * 8 + b'{"__metadata__":{"format":"bnuq_bank"}}',
        "have a header of 1 to 39 bytes, got 18446744073709551615",
    ),
    "large header": (
        forged(bank_file.OPENING + b" " * (9 << 20)),
        "have a header of 1 to 2097152 bytes, got 9437221",
    ),
    "blanks": (forged(b" " * (9 << 20)), "be a bank that Bank.save wrote, got another kind of"),
    "text": (b"mean, variance\n" * 9, "be a bank that Bank.save wrote, got another kind of file"),
    "no JSON": (forged(b"{'a': 1}"), "have a JSON header, got Expecting property name"),
    "no UTF-8": (forged(b'{"\xff": 1}'), "have a JSON header, got 'utf-8' codec can't decode"),
    "nested": (forged(b"[" * 100_000), f"have a JSON header, got {TOO_DEEP}"),
    "long number": (
        forged(b'{"a":' + b"9" * 5000 + b"}"),
        "have a JSON header, got Exceeds the limit",
    ),
    "list": (forged(b"[1, 2]"), "state the format 'bnuq_bank', got another or none"),
    "no metadata": (forged(b'{"a": 1}'), "state the format 'bnuq_bank', got another or none"),
    "other library's": (
        safetensors.torch.save({"mean/a": torch.ones(2, 3)}),
        "state the format 'bnuq_bank', got another or none",
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_refuses_other_files(name):
    data, text = RAW[name]
    message = refused(data)
    assert message and text in message, message


def test_refuses_another_form_of_the_same_header(sample):
    header, body = split(sample)
    spaced = forged(json.dumps(header).encode(), body)
    doubled = forged(
        encoded(header).replace(b'"version":"1"', b'"version":"1","version":"1"'), body
    )
    for data in (spaced, doubled):
        assert "have its header in canonical form, got other bytes" in refused(data)


def test_states_the_digest_that_it_finds(sample):
    header, body = split(sample)
    message = refused(forged(header, bytes(len(body))))
    assert f"have the SHA-256 that it states, '{header['__metadata__']['sha256']}', got " in message


def test_a_checkpoint_is_no_bank(tmp_path):
    torch.save({"weight": torch.ones(3)}, tmp_path / "network.pt")
    message = refused((tmp_path / "network.pt").read_bytes())
    assert message.endswith("must be a bank that Bank.save wrote, got another kind of file")


def test_a_damaged_length_and_a_cut_header_are_those_of_a_bank(sample):
    assert "have a header of 1 to " in refused(sample[:7] + b"\x80" + sample[8:])
    for size in (8, 9, 40, 200):
        length = int.from_bytes(sample[:8], "little")
        assert f"have a header of 1 to {size - 8} bytes, got {length}" in refused(sample[:size])


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_runs_nothing(tmp_path):
    mark = tmp_path / "ran"
    pickled = pickle.dumps(Payload(mark))
    torch.save({"bank": Payload(mark)}, tmp_path / "zip")
    headed = len(pickled).to_bytes(8, "little") + pickled
    for i, data in enumerate((pickled, headed, (tmp_path / "zip").read_bytes())):
        path = tmp_path / f"{i}.bank"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"Bank.load: file '{path}' must "):
            bnuq.Bank.load(path)
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists()


@pytest.mark.parametrize("unit", [b"[],", b"[[[[[[[[]]]]]]]],", b'{"a":{}},', b'"",', b"0.5,"])
def test_an_untrusted_header_takes_bounded_memory(unit, monkeypatch):
    monkeypatch.setattr(bank_file, "LARGEST_HEADER", 1 << 17)
    text = b"[" + unit * ((1 << 17) // len(unit) - 1) + b"0]"
    data = forged(text + b" " * (-len(text) % 8))
    tracemalloc.start()
    try:
        assert "state the format 'bnuq_bank'" in refused(data)
        assert tracemalloc.get_traced_memory()[1] < 50 * (1 << 17)
    finally:
        tracemalloc.stop()
