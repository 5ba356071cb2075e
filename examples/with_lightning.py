"""Lightning trains a network, and its predictions come with uncertainty.
Needs lightning and scikit-learn.

Save the bank beside the checkpoint: it is no part of the state_dict. The checkpoint itself is that
of the plain network, and loads with or without this package.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bnuq_ext as bnuq


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        hidden = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()
        self.network = bnuq.convert(nn.Sequential(*hidden, nn.Linear(128, 10)))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

    def on_fit_end(self):
        self.bank = bnuq.collect(self.network, self.trainer.train_dataloader, num_batches=64)

    def predict_step(self, batch, _):
        return bnuq.predict(self.network, batch[0], likelihood="categorical", seed=0)


def main(folder=".", epochs=20):
    from bnuq_ext import data

    train, _, test = data.digits()
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder)
    model = Classifier()
    trainer.fit(model, DataLoader(TensorDataset(*train), batch_size=16, shuffle=True))
    trainer.save_checkpoint(f"{folder}/model.ckpt")
    model.bank.save(f"{folder}/model.bank")

    model = Classifier.load_from_checkpoint(f"{folder}/model.ckpt")
    bnuq.attach(model.network, bnuq.Bank.load(f"{folder}/model.bank"))
    (pred,) = trainer.predict(model, DataLoader(TensorDataset(*test), batch_size=len(test.x)))
    return pred, test.y


if __name__ == "__main__":
    pred, y = main()
    right = pred.mean.argmax(1) == y
    print(f"accuracy {right.double().mean():.3f}")
    print(f"mutual information of right answers {pred.mutual_information[right].mean():.3f} nats")
    print(f"mutual information of wrong answers {pred.mutual_information[~right].mean():.3f} nats")
