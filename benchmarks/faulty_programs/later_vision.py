"""Later programs on images: beginners' networks and convolutions, a segmentation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, discs
from .program import Setup, program
from .shared import accuracy, evaluating, tuples


class Net(nn.Module):
    """Two convolutions and two linear layers, as in a first tutorial; `last` comes after the class scores."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 12, 3)
        self.fc1 = nn.Linear(48, 32)
        self.fc2 = nn.Linear(32, 10)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """Return what `last` makes of the scores."""
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.view(-1, 48)))
        out: Tensor = self.last(self.fc2(x))
        return out


@program(
    "vision",
    "wrong-loss",
    story="The network ends in a softmax, and CrossEntropyLoss applies another one.",
    source="https://discuss.pytorch.org/t/cross-entropy-loss-is-not-decreasing/43814",
)
def softmax_layer_before_cross_entropy(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), Net(nn.Softmax(dim=1) if faulty else nn.Identity())
    criterion = nn.CrossEntropyLoss()
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: criterion(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "vision",
    "dead-units",
    "zero-gradient",
    "wrong-loss",
    story="A ReLU is also applied to the class scores: classes whose score is negative everywhere get no gradient.",
    source="https://ai.stackexchange.com/questions/8491/does-it-make-sense-to-apply-softmax-on-top-of-relu",
)
def relu_on_the_class_scores(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), Net(nn.ReLU() if faulty else nn.Identity())
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.nll_loss(F.log_softmax(net(batch[0]), dim=1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "vision",
    "unscaled-data",
    "exploding-gradient",
    story="Pixels are read as bytes, 0 to 255, and never divided.",
    source="http://www.javashuo.com/article/p-fzvxgoti-kq.html",
)
def pixels_up_to_255(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    scale = 255.0 if faulty else 1.0
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x * scale, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test * scale, data.y_test),
    )


def _normal(module: nn.Module, std: float) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, std)
        nn.init.zeros_(module.bias)


@program(
    "vision",
    "poor-initialisation",
    "saturation",
    "exploding-gradient",
    story="Every weight is drawn from a normal distribution of deviation one, whatever the width of its layer.",
    source="http://www.javashuo.com/article/p-fzvxgoti-kq.html",
    same_start=False,
)
def weights_of_deviation_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    hidden = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
    net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))
    net.apply(lambda m: _normal(m, 1.0 if faulty else 0.12))
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


def _normalized() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@program(
    "vision",
    "batch-size-unfit",
    "batch-dependence",
    story="Batches of two images under batch normalization: every feature is plus or minus one.",
    source="HuiZeng/Grid-Anchor-based-Image-Cropping-Pytorch#2",
)
def two_images_for_batch_norm(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _normalized()
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=2 if faulty else 32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "vision",
    "eval-mode",
    "unscaled-data",
    story="A helper calls model.eval() before the loss: batch normalization never sees the scale of the data.",
    source="ServiceNow/LCFCN#20",
)
def helper_leaves_it_in_eval(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), _normalized_head())
    if faulty:
        net.eval()
    x, x_test = data.x * 255 + 900, data.x_test * 255 + 900  # sensor counts above a black level
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, x_test, data.y_test),
    )


def _normalized_head() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


@program(
    "vision",
    "labels-shuffled",
    story="The file list is shuffled after the labels were read from it.",
    source="Borda/kaggle_image-classify#12",
)
def files_shuffled_after_their_labels(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), Net(nn.Identity())
    order = torch.randperm(len(data.x)) if faulty else torch.arange(len(data.x))
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x[order], data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _LeNet(nn.Module):
    """The network of a well-known course, with a choice of activation."""

    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), act(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 3), act())
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 60), act(), nn.Linear(60, 42), act(), nn.Linear(42, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x))
        return out


@program(
    "vision",
    "vanishing-gradient",
    "saturation",
    "poor-initialisation",
    story="Sigmoids after every layer of LeNet: hardly a gradient reaches the convolutions, and the loss stays at 2.3.",
    source="https://devgem.io/posts/troubleshooting-stagnant-training-metrics-in-lenet-model-training",
)
def sigmoids_all_the_way(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _LeNet(nn.Sigmoid if faulty else nn.ReLU)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "segmentation",
    "wrong-loss",
    story="The Dice loss is computed from raw scores: without a sigmoid it falls without end.",
    loss_tells=False,
)
def dice_of_raw_scores(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = discs(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)
    )

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        out, mask = net(batch[0]), batch[1]
        p = out if faulty else torch.sigmoid(out)
        return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)

    def score() -> float:
        with evaluating(net):
            found, mask = net(data.x_test) > 0, data.y_test > 0.5
        return float((found & mask).sum() / (found | mask).sum().clamp(min=1))

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=250,
        score=score,
    )


VISION = (
    softmax_layer_before_cross_entropy,
    relu_on_the_class_scores,
    pixels_up_to_255,
    weights_of_deviation_one,
    two_images_for_batch_norm,
    helper_leaves_it_in_eval,
    files_shuffled_after_their_labels,
    sigmoids_all_the_way,
    dice_of_raw_scores,
)
