"""Handwritten digits that ship with scikit-learn, 1,797 images of 8 x 8: an MLP and a CNN."""

import importlib
from functools import cache

import torch
from torch import Tensor, nn

from steadystep.errors import ConfigError
from steadystep.lab.tasks.classifier import Batch, classifier
from steadystep.lab.tasks.shuffled import Shuffled
from steadystep.lab.tasks.task import Task, TaskInfo

_NUM_TESTS = 360


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """Images in 0 to 1 and their digits, in one order for every seed: neighbours in the file are by one writer."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ModuleNotFoundError:
        raise ConfigError("the digits come with scikit-learn: pip install 'steadystep[lab]'") from None
    images, digits = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(12345))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(digits, dtype=torch.long)[order]


def _split() -> tuple[Batch, Batch]:
    images, digits = _digits()
    return (images[_NUM_TESTS:], digits[_NUM_TESTS:]), (images[:_NUM_TESTS], digits[:_NUM_TESTS])


def make_mlp(seed: int) -> Task:
    """Two hidden layers of 64, SGD with momentum."""
    train, tests = _split()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return classifier(model, optimizer, Shuffled(*train, batch_size=64, seed=seed).batch, tests)


def make_cnn(seed: int) -> Task:
    """Two convolutions with BatchNorm, pooled to 4 x 4."""
    train, tests = _split()
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    return classifier(model, optimizer, Shuffled(*train, batch_size=64, seed=seed).batch, tests)


DIGITS_MLP = TaskInfo(name="digits-mlp", about="digits, MLP, SGD 0.05 momentum 0.9", num_steps=1000, make=make_mlp)
DIGITS_CNN = TaskInfo(name="digits-cnn", about="digits, CNN, BatchNorm, AdamW 2e-3", num_steps=1000, make=make_cnn)
