"""Banks and files of banks for the tests, whole and forged."""

import hashlib
import io
import json

import torch

import bnuq_ext as bnuq
from bnuq_ext import bank_file


def make_bank(num_snapshots=4, channels=(3, 5), dtypes=(torch.float32,), seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)
    mean, var, count = {}, {}, {}
    for i, c in enumerate(channels):
        dtype = dtypes[i % len(dtypes)]
        mean[f"layer{i}.bn"] = torch.randn(num_snapshots, c, generator=generator, dtype=dtype)
        var[f"layer{i}.bn"] = torch.rand(num_snapshots, c, generator=generator, dtype=dtype)
        count[f"layer{i}.bn"] = torch.randint(2, 99, (num_snapshots,), generator=generator)
    return bnuq.Bank(mean, var, count, **{"batch_size": 8, **fields})


def file_bytes(bank, path):
    bank.save(path)
    return path.read_bytes()


def read(data, name="some.bank"):
    """`Bank.load` of bytes in memory."""
    return bnuq.Bank.from_file(*bank_file.read(io.BytesIO(data), len(data), name), name)


def refused(data):
    """The message with which the bytes are refused; None if they are read."""
    try:
        read(data)
    except ValueError as error:
        assert str(error).startswith("Bank.load: file 'some.bank' must "), error
        return str(error)
    return None


def split(data):
    """(header as a dict, bytes of the tensors)."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def forged(header, body=b"", seal=False):
    """A file with this header (a dict or bytes), padded; with `seal` its SHA-256 is made to fit."""
    if seal:
        fields = header["__metadata__"]
        header["__metadata__"] = {k: v for k, v in fields.items() if k != "sha256"} | {"sha256": ""}
        text = encoded(header)
        digest = hashlib.sha256(len(text).to_bytes(8, "little") + text + body).hexdigest()
        header["__metadata__"]["sha256"] = digest
    text = header if isinstance(header, bytes) else encoded(header)
    return len(text).to_bytes(8, "little") + text + body


def encoded(header):
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
