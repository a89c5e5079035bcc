"""What a process does that has PyTorch Lightning by its former name."""

from __future__ import annotations

import sys
import warnings

import torch
from torch.utils.data import DataLoader

from tests.losses import losses_of
from tests.monitor.digits import Digits, Shuffled, classifier


def norms_of_pytorch_lightning() -> list[float]:
    """Train for an epoch, and return the gradient norms that were measured."""
    warnings.simplefilter("ignore")
    import pytorch_lightning as package

    from gradstats.integrations.lightning import GradStatsCallback

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = classifier()

        def training_step(self, batch, index):
            return losses_of(self.net, batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)

    callback = GradStatsCallback(every=2)
    assert isinstance(callback, package.Callback) and "lightning.pytorch" not in sys.modules
    trainer = package.Trainer(
        callbacks=[callback], accelerator="cpu", max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Digits(36), batch_size=8, sampler=Shuffled(36)))
    return callback.monitor.history["grad_norm"]
