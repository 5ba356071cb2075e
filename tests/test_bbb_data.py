"""The images that Bayes by Backprop is trained on as in the report."""

import struct
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from packed import idx
from test_bbb import TINY

from bnuq_ext.experiments import bbb
from bnuq_ext.protocols import batch_size, deep


def test_scalings():
    pixels = torch.tensor([0.0, 33.0, 126.0, 255.0])
    expected = {
        "255": pixels / 255,
        "standard": (pixels / 255 - 0.1307) / 0.3081,
        "126": pixels / 126,
    }
    for name, scale in bbb.SCALINGS.items():
        torch.testing.assert_close(scale(pixels / 255), expected[name])


def write_idx(folder, rows, num_test=30, label=0):
    """MNIST's four files with images of six pixels and one label."""
    generator = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for part, count in (("train", rows), ("t10k", num_test)):
        images = generator.integers(0, 256, (count, 2, 3), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx([label] * count))


@pytest.mark.parametrize("inside", [".", "mnist"])
def test_mnist_files_are_read(tmp_path, inside):
    write_idx(tmp_path / inside, 126)
    settings = replace(TINY, epochs=1)
    split, states = bbb.run(
        tmp_path / "out", ["gaussian"], settings, data_root=tmp_path, progress=False
    )
    assert [len(part.x) for part in split] == [105, 21, 30]
    assert states["gaussian"].network[0].in_features == 6


def test_ten_thousand_images_at_most_are_for_validation(tmp_path):
    write_idx(tmp_path, 60_006)
    assert [len(part.x) for part in bbb.load_data(tmp_path, "255")] == [50_006, 10_000, 30]


@pytest.mark.parametrize("shape", [(), (126,)])
def test_labels_under_the_name_of_images_are_refused(tmp_path, shape):
    write_idx(tmp_path, 126)
    path = tmp_path / "train-images-idx3-ubyte"
    header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    path.write_bytes(header + bytes(126 if shape else 1))
    with pytest.raises(ValueError) as caught:
        bbb.load_data(tmp_path, "255")
    assert str(caught.value) == f"mnist: {path} must hold images, got values of shape {list(shape)}"


@pytest.mark.parametrize(
    "files, text",
    [
        ({"rows": 126, "num_test": 0}, "hold images for the test part, got none"),
        ({"rows": 5}, "hold images for the validation part, got none"),
        ({"rows": 60, "label": 10}, "hold labels in [0, 10), got 10 in the train part"),
    ],
)
def test_refuses_other_files(tmp_path, files, text):
    write_idx(tmp_path, **files)
    with pytest.raises(ValueError) as caught:
        bbb.run(tmp_path / "out", ["gaussian"], TINY, data_root=tmp_path, progress=False)
    assert str(caught.value) == f"bbb: data_root must {text}"
    assert not (tmp_path / "out").exists()


def test_protocols_refuse_other_labels(tmp_path):
    for name in ("mnist", "fashion-mnist"):
        write_idx(tmp_path / name, 126, label=10)
    settings = replace(batch_size.QUICK, num_validation=20, batch_sizes=(32,))
    for load in (
        partial(deep.load, str(tmp_path), 0),
        partial(batch_size.load, settings, str(tmp_path), 0),
    ):
        with pytest.raises(ValueError) as caught:
            load()
        text = "reproduce: data_root must hold labels in [0, 10), got 10 in the train part"
        assert str(caught.value) == text


def test_a_checkpoint_goes_on_with_its_own_settings_and_prior_alone(tmp_path):
    short = replace(TINY, epochs=1)
    bbb.run(tmp_path, ["gaussian"], short, progress=False)
    source = tmp_path / "gaussian" / "checkpoint.safetensors"
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture" / source.name).write_bytes(source.read_bytes())
    refusal = "delete it to start again.* or that of another run$"
    with pytest.raises(ValueError, match=refusal):
        bbb.run(tmp_path, ["mixture"], short, progress=False)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=refusal):
        bbb.run(tmp_path, ["gaussian"], replace(short, scaling="126"), progress=False)


def test_what_lies_beside_a_checkpoint_is_written_again(tmp_path):
    short = replace(TINY, epochs=1)
    bbb.run(tmp_path, ["gaussian"], short, progress=False)
    log = tmp_path / "gaussian" / "log.json"
    beside = {path: path.read_text() for path in (tmp_path / "settings.json", log)}
    for path in beside:
        path.unlink()
    bbb.run(tmp_path, ["gaussian"], short, progress=False)
    assert {path: path.read_text() for path in beside} == beside
    with pytest.raises(ValueError, match="got one with hidden [^;]*$"):
        bbb.run(tmp_path, ["gaussian"], replace(short, hidden=9), progress=False)
