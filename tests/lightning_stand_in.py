"""As much of lightning as the example uses, in the order of calls that lightning makes."""

import types
from dataclasses import is_dataclass

import torch
from torch import nn


class LightningModule(nn.Module):
    trainer = None

    @classmethod
    def load_from_checkpoint(cls, path):
        model = cls()
        model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        return model


class Trainer:
    def __init__(self, max_epochs=1, **_):
        self.max_epochs = max_epochs

    def fit(self, model, loader):
        self.model, self.train_dataloader, model.trainer = model.train(), loader, self
        optimizer = model.configure_optimizers()
        for _ in range(self.max_epochs):
            for number, batch in enumerate(loader):
                optimizer.zero_grad()
                model.training_step(batch, number).backward()
                optimizer.step()
        model.on_fit_end()

    def save_checkpoint(self, path):
        torch.save({"state_dict": self.model.state_dict()}, path)

    def predict(self, model, loader):
        model.eval()
        with torch.inference_mode():
            return [self.moved(model.predict_step(*pair[::-1])) for pair in enumerate(loader)]

    @staticmethod
    def moved(result):
        # Lightning moves results between devices field by field, and refuses a frozen dataclass.
        assert not (is_dataclass(result) and result.__dataclass_params__.frozen)
        return result


def module():
    """A module named lightning."""
    made = types.ModuleType("lightning")
    made.LightningModule, made.Trainer = LightningModule, Trainer
    return made
