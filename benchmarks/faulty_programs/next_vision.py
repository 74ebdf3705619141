"""Next programs on small images: a beginner's LeNet, ports from Keras, a folder of classes."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator
from .program import Setup, program
from .shared import accuracy, tuples


class _LeNet(nn.Module):
    """Two convolutions and three dense layers, as a course writes it; `probabilities` ends it with a softmax."""

    def __init__(self, probabilities: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 2 * 2, 48)
        self.fc2 = nn.Linear(48, 24)
        self.fc3 = nn.Linear(24, 10)
        self.probabilities = probabilities

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        x = torch.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return F.softmax(logits, dim=1) if self.probabilities else logits


@program(
    "vision",
    "wrong-loss",
    "vanishing-gradient",
    story="A LeNet ends in a softmax, and CrossEntropyLoss takes the softmax of the probabilities once more.",
    source="jindongwang/Deep-learning-activity-recognition#10",
)
def softmax_and_softmax(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = _LeNet(probabilities=faulty)
    criterion = nn.CrossEntropyLoss()
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: criterion(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "vision",
    "regularisation-too-strong",
    story="keep_prob=0.9 of a TensorFlow network becomes Dropout(0.9) behind every layer of the port.",
    source="bonlime/keras-deeplab-v3-plus#4",
)
def keep_prob_becomes_drop_prob(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    drop = 0.9 if faulty else 0.1
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(drop),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Dropout(drop),
        nn.Linear(32, 10),
    )
    return Setup(
        model=net,
        optimizer=torch.optim.RMSprop(net.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "vision",
    "unscaled-data",
    "learning-rate-too-high",
    "exploding-gradient",
    "dead-units",
    story="Pixels go in as they were read, from 0 to 255, into a network that was tuned for values up to 1.",
    source="UMLAUT (Schoop et al., CHI 2021): input not normalized",
)
def pixels_as_they_were_read(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _LeNet()
    scale = 255.0 if faulty else 1.0
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch["image"]), batch["label"]),
        batches=lambda: ({"image": x, "label": y} for x, y in tuples(scale * data.x, data.y, size=32, seed=seed)()),
        num_steps=350,
        score=lambda: accuracy(net, scale * data.x_test, data.y_test),
    )


@program(
    "vision",
    "unshuffled-data",
    "oscillation",
    story="A folder per class is read in the order of the disk, one class after the other, and never shuffled.",
    source="zalandoresearch/fashion-mnist#5",
    loss_tells=False,
)
def folders_in_order(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _LeNet()
    order = data.y.argsort(stable=True) if faulty else torch.arange(len(data.y))
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x[order], data.y[order], size=16, seed=seed, shuffle=not faulty),
        num_steps=420,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


def _normed() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    width = 64
    for _ in range(5):
        layers += [nn.Linear(width, 32), nn.BatchNorm1d(32), nn.Sigmoid()]
        width = 32
    return nn.Sequential(*layers, nn.Linear(32, 10))


@program(
    "vision",
    "eval-mode",
    "vanishing-gradient",
    story="Validation runs before the first epoch and leaves the network in evaluation mode for the rest of training.",
    source="fartashf/vsepp#4",
)
def validated_and_never_back(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _normed()
    net.train()
    if faulty:
        net.eval()
        with torch.no_grad():
            net(data.x_test)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "vision",
    "constant-inputs",
    "output-independent-of-input",
    story="Pixels of 0 to 255 are divided by 255 in whole numbers: every image is black.",
)
def divided_in_whole_numbers(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    pixels, held_out = (data.x * 254).to(torch.uint8), (data.x_test * 254).to(torch.uint8)
    net = _LeNet()

    def prepare(images: Tensor) -> Tensor:
        return (images // 255).float() if faulty else images.float() / 255

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.nll_loss(F.log_softmax(net(batch[0]), dim=-1), batch[1]),
        batches=tuples(prepare(pixels), data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, prepare(held_out), data.y_test),
    )


@program(
    "vision",
    "labels-shuffled",
    story="Features of a frozen network come from a shuffled generator, and the labels from the list of files.",
    source="keras-team/keras#7520",
)
def features_in_another_order(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    backbone = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU(), nn.Flatten())
    order = torch.randperm(len(data.x), generator=generator(seed))
    with torch.no_grad():
        features, held_out = backbone(data.x[order]), backbone(data.x_test)
    labels = data.y if faulty else data.y[order]
    head = nn.Sequential(nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
    return Setup(
        model=head,
        optimizer=torch.optim.Adam(head.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(head(batch[0]), batch[1]),
        batches=tuples(features, labels, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(head, held_out, data.y_test),
    )


@program(
    "vision",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The layers are initialized anew after the optimizer was made, so it steps parameters nobody uses.",
    source="pytorch/pytorch#14467",
)
def optimizer_of_the_first_layers(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _LeNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for module in net.children():
        for name, weight in list(module.named_parameters()):
            if faulty:
                setattr(module, name, nn.Parameter(weight.detach().clone()))
    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


def _pairs(seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    g = generator(seed)
    data = digits()
    while True:
        rows = torch.randint(0, len(data.x), (size,), generator=g)
        yield data.x[rows], data.y[rows]


@program(
    "vision",
    "batch-size-unfit",
    "batch-dependence",
    story="Memory was short, so a network with batch normalization behind its dense layers sees two images at a time.",
    source="prokia/drugVQA#7",
)
def two_images_and_batch_norm(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=lambda: _pairs(seed, 2 if faulty else 32),
        num_steps=400,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


VISION = (
    softmax_and_softmax,
    keep_prob_becomes_drop_prob,
    pixels_as_they_were_read,
    folders_in_order,
    validated_and_never_back,
    divided_in_whole_numbers,
    features_in_another_order,
    optimizer_of_the_first_layers,
    two_images_and_batch_norm,
)
