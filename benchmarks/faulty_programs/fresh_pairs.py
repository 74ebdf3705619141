"""Fresh programs that compare: metric learning, two towers, recommendations, graphs."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import blocks, digits, generator
from .fresh_data import molecules, purchases, speakers
from .program import Setup, program
from .shared import binary_accuracy, dicts, evaluating, indices, mlp, tuples


def _neighbors(model: nn.Module, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> float:
    """Return the accuracy of the nearest class mean on the unit sphere."""
    with evaluating(model):
        known, asked = F.normalize(model(x), dim=1), F.normalize(model(x_test), dim=1)
    means = F.normalize(torch.stack([known[y == k].mean(0) for k in range(int(y.max()) + 1)]), dim=1)
    return float(((asked @ means.T).argmax(1) == y_test).float().mean())


@program(
    "metric",
    "constant-targets",
    story="Whether two recordings are of one speaker is asked with `is`, of two tensors: it is never the case.",
    loss_tells=False,
)
def same_speaker_by_identity(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = speakers(seed), mlp(24, 32, 8)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        pick = generator(seed)
        groups = [(data.y == k).nonzero().squeeze(1) for k in range(6)]
        for left in indices(len(data.y), 48, seed):
            right = torch.randint(0, len(data.y), (48,), generator=pick)
            for n in range(0, 48, 2):
                own = groups[int(data.y[left[n]])]
                right[n] = own[int(torch.randint(0, len(own), (1,), generator=pick))]
            pairs = zip(data.y[left], data.y[right], strict=True)
            same = torch.tensor([float((a is b) if faulty else (a == b)) for a, b in pairs])
            yield data.x[left], data.x[right], same

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        left, right, same = batch
        far = (F.pairwise_distance(model(left), model(right)) + 1e-6).clamp(max=10)
        return (same * far**2 + (1 - same) * (1.5 - far).clamp(min=0) ** 2).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=250,
        score=lambda: _alike(model, data.x_test, data.y_test),
    )


def _alike(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return how much nearer rows of one class are than others, in mean distances."""
    with evaluating(model):
        far = torch.cdist(model(x), model(x))
    same = y.view(-1, 1) == y.view(1, -1)
    other = ~torch.eye(len(y), dtype=torch.bool)
    return float((far[~same].mean() - far[same & other].mean()) / far[other].mean())


@program(
    "metric",
    "wrong-loss",
    "output-independent-of-input",
    story="CosineEmbeddingLoss wants 1 and -1 and gets 1 and 0: pairs of different digits cost nothing.",
    source="https://sachinruk.github.io/programming_tips/cosine-embedding-loss.html (explains the target as 1 and 0)",
    loss_tells=False,
)
def different_pairs_are_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 48, 16, act=nn.Tanh)
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    x, x_test = data.x.flatten(1) - 0.3, data.x_test.flatten(1) - 0.3

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = model(batch[0]).chunk(2)
        a, b = batch[1].chunk(2)
        target = (a == b).long() if faulty else 2 * (a == b).long() - 1
        result: Tensor = criterion(first, second, target)
        return result

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(x, data.y, size=128, seed=seed),
        num_steps=300,
        score=lambda: _neighbors(model, x, data.y, x_test, data.y_test),
    )


class _Towers(nn.Module):
    """An image and a caption in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.image = mlp(64, 48, 16)
        self.words = nn.Embedding(40, 24)
        self.text = mlp(24, 32, 16)

    def forward(self, image: Tensor, caption: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(self.words(caption).mean(1)), dim=1)


def _captions(y: Tensor, g: torch.Generator) -> Tensor:
    """Return "a small photo of a handwritten digit: N, style", with two words for every digit and ten styles."""
    words = torch.arange(8).repeat(len(y), 1)
    number = 10 + 2 * y + torch.randint(0, 2, y.shape, generator=g)
    return torch.cat([words, number.unsqueeze(1), torch.randint(30, 40, (len(y), 1), generator=g)], dim=1)


def _clip(seed: int, size: int, kept: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _Towers()
    captions = _captions(data.y, generator(seed))
    labels = _captions(torch.arange(10), generator(4))[:, :kept]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        image, text = model(batch[0], batch[1][:, :kept])
        logits, match = image @ text.T / 0.1, torch.arange(len(image))
        return (F.cross_entropy(logits, match) + F.cross_entropy(logits.T, match)) / 2

    def score() -> float:
        with evaluating(model):
            image, text = model(data.x_test.flatten(1), labels)
        return float(((image @ text.T).argmax(1) == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x.flatten(1), captions, size=size, seed=seed),
        num_steps=300,
        score=score,
    )


@program(
    "contrastive",
    "constant-inputs",
    "output-independent-of-input",
    story="Captions are cut to eight words, and the first eight are the same in every caption.",
)
def captions_cut_to_the_template(faulty: bool, seed: int) -> Setup:
    return _clip(seed, 64, 8 if faulty else 10)


@program(
    "contrastive",
    "batch-size-unfit",
    story="Two pairs per batch: each image is told apart from a single other caption.",
    loss_tells=False,
)
def one_negative_per_pair(faulty: bool, seed: int) -> Setup:
    return _clip(seed, 2 if faulty else 64, 10)


class _Experts(nn.Module):
    """Tastes of users and items, mixed by a gate over four experts."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(60, 12), nn.Embedding(40, 12)
        self.experts = nn.ModuleList(mlp(24, 24, 1) for _ in range(4))
        self.gate = nn.Linear(24, 4)
        self.axis = axis

    def forward(self, pairs: Tensor) -> Tensor:
        x = torch.cat([self.user(pairs[:, 0]), self.item(pairs[:, 1])], dim=1)
        opinions = torch.cat([expert(x) for expert in self.experts], dim=1)
        logits: Tensor = (self.gate(x).softmax(self.axis) * opinions).sum(1)
        return logits


@program(
    "recommender",
    "softmax-axis",
    "batch-dependence",
    story="The gate's softmax runs over the batch: the experts' weights of one pair depend on all the others.",
)
def gate_over_the_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = purchases(seed), _Experts(0 if faulty else 1)
    criterion = nn.BCEWithLogitsLoss()
    return Setup(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.05),
        loss=lambda batch: criterion(model(batch["pair"]), batch["bought"]),
        batches=dicts({"pair": data.x, "bought": data.y}, size=128, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


class _Molecules(nn.Module):
    """Two rounds of messages along a list of edges, then a sum over the atoms of each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(8, 32, 16), mlp(32, 32, 16)
        self.head = nn.Linear(20, 1)

    def forward(self, x: Tensor, edges: Tensor, count: int) -> Tensor:
        start = x
        for layer in (self.first, self.second):
            heard = torch.zeros_like(x).index_add(0, edges[0], x[edges[1]])
            x = layer(torch.cat([x, heard], dim=1))
        atoms = torch.cat([start, x], dim=1).view(count, -1, 20)
        value: Tensor = self.head(atoms.sum(1))
        return value.squeeze(1)


@program(
    "graph",
    "batch-dependence",
    story="Graphs are put into one batch without shifting the node numbers: all edges are between nodes of the first.",
    source="google-deepmind/graph_nets#135",
)
def edges_of_the_first_graph(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (edges, x, y), model = molecules(seed), _Molecules()

    def joined(rows: Tensor) -> tuple[Tensor, Tensor, int]:
        graph, a, b = edges[rows].nonzero().T
        shift = 0 * graph if faulty else 8 * graph
        return x[rows].flatten(0, 1), torch.stack([a + shift, b + shift]), len(rows)

    def score() -> float:
        held = torch.arange(300, 400)
        with evaluating(model):
            error = (model(*joined(held)) - y[held]).pow(2).mean() / y[held].var()
        return max(-1.0, 1 - float(error))

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(*batch[0]), batch[1]),
        batches=lambda: ((joined(rows), y[rows]) for rows in indices(300, 20, seed)),
        num_steps=400,
        score=score,
    )


@program(
    "graph",
    "target-leak",
    "suspicious-perfection",
    story="Known labels are given as columns, and a node that is trained on gets its own along with its neighbors'.",
    loss_tells=False,
)
def own_label_among_the_columns(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    edges, x, y = blocks(seed)
    train = torch.arange(240) < 160
    known = F.one_hot(y, 3).float() * train.unsqueeze(1)
    around = edges @ known / edges.sum(1, keepdim=True).clamp(min=1)
    columns = torch.cat([x, around, 4 * known if faulty else 0 * known], dim=1)
    model = mlp(14, 32, 3)

    def score() -> float:
        with evaluating(model):
            return float((model(columns[~train]).argmax(1) == y[~train]).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(columns[train], y[train], size=40, seed=seed),
        num_steps=200,
        score=score,
    )


PAIRS = (
    same_speaker_by_identity,
    different_pairs_are_zero,
    captions_cut_to_the_template,
    one_negative_per_pair,
    gate_over_the_batch,
    edges_of_the_first_graph,
    own_label_among_the_columns,
)
