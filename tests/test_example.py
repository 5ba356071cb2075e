"""The Lightning example, with lightning where it is installed, else with a stand-in."""

import importlib.util
import sys
import warnings
from pathlib import Path

import lightning_stand_in
import torch

PATH = Path(__file__).parent.parent / "examples" / "with_lightning.py"


def load(monkeypatch):
    if importlib.util.find_spec("lightning") is None:
        monkeypatch.setitem(sys.modules, "lightning", lightning_stand_in.module())
    spec = importlib.util.spec_from_file_location("with_lightning", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_lightning_example(monkeypatch, tmp_path):
    with warnings.catch_warnings():
        if importlib.util.find_spec("lightning"):
            warnings.simplefilter("ignore")  # lightning's own
        pred, y = load(monkeypatch).main(str(tmp_path), epochs=8)
    assert (pred.mean.argmax(1) == y).double().mean() > 0.8
    right = pred.mean.argmax(1) == y
    assert pred.mutual_information[~right].mean() > pred.mutual_information[right].mean()
    # The checkpoint is that of the plain network.
    saved = torch.load(tmp_path / "model.ckpt", weights_only=False)["state_dict"]
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128))
    assert saved.keys() > {f"network.{name}" for name in plain.state_dict()}
    assert not [name for name in saved if "bank" in name or "snapshot" in name]
