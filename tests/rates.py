"""The learning rates that a training has gone through."""

import torch


def record_sgd(monkeypatch) -> list[torch.optim.SGD]:
    """Every SGD made from now on, with the rate of each of its steps in `rates`."""
    made = []

    class Recorded(torch.optim.SGD):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.rates = []
            made.append(self)

        def step(self, *arguments):
            self.rates.append(self.param_groups[0]["lr"])
            return super().step(*arguments)

    monkeypatch.setattr(torch.optim, "SGD", Recorded)
    return made
