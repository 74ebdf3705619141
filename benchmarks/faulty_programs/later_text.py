"""Later programs on text: a Keras port, a Hugging Face loop, names of three languages, letters."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import LETTERS, names, prose, sentences
from .program import Setup, program
from .shared import accuracy, dicts, evaluating, tuples


class _KerasLike(nn.Module):
    """Embedding, LSTM, Dropout, Dense."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(71, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=batch_first)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(x), None)
        out: Tensor = self.fc(self.dropout(x[:, -1, :]))
        return out


@program(
    "text",
    "batch-dependence",
    "output-independent-of-input",
    "constant-inputs",
    story="The LSTM of a Keras port lacks batch_first: it runs over the batch, and x[:, -1] reads the padding.",
    source="https://discuss.pytorch.org/t/the-loss-in-pytorch-decreases-slower-than-in-keras/61598",
)
def lstm_ported_from_keras(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _KerasLike(batch_first=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=400,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Bert(nn.Module):
    """An encoder in the style of Hugging Face: keyword arguments in, a dict with loss and logits out."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(71, width, padding_idx=0)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, ignore: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.encoder(self.embeddings(input_ids) + self.position, src_key_padding_mask=ignore)
        kept = (~ignore).unsqueeze(-1).float()
        logits = self.classifier((x * kept).sum(1) / kept.sum(1).clamp(min=1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _bert(faulty: bool, seed: int, *, rate: float = 1e-3, inverted: bool = False, layers: int = 2) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Bert(layers)

    def ignored(ids: Tensor) -> Tensor:
        mask = ids != 0  # the attention mask of a tokenizer: True where there is a word
        return mask if inverted else ~mask

    def score() -> float:
        with evaluating(model):
            logits = model(data.x_test, ignored(data.x_test), data.y_test)["logits"]
        return float((logits.argmax(1) == data.y_test).float().mean())

    def loss(batch: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = model(batch["input_ids"], ignored(batch["input_ids"]), batch["labels"])["loss"]
        return outputs

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=rate),
        loss=loss,
        batches=dicts({"input_ids": data.x, "labels": data.y}, size=32, seed=seed),
        num_steps=250,
        score=score,
    )


@program(
    "text",
    "learning-rate-too-high",
    "output-independent-of-input",
    story="An encoder is trained with a rate of 0.05 and gives the same output for every sentence.",
    source="huggingface/transformers#735",
)
def same_logits_for_every_sentence(faulty: bool, seed: int) -> Setup:
    return _bert(faulty, seed, rate=0.05 if faulty else 1e-3, layers=3)


@program(
    "text",
    "output-independent-of-input",
    "constant-inputs",
    story="The tokenizer's mask (1: a word) is passed where PyTorch expects the opposite (True: ignore).",
)
def attention_mask_the_other_way(faulty: bool, seed: int) -> Setup:
    return _bert(faulty, seed, inverted=faulty)


class Letters(nn.Module):
    """A recurrent network over the letters of a name, from a set of lecture notes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(27, 12, padding_idx=0)
        self.rnn = nn.GRU(12, 32, batch_first=True)
        self.out = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the three languages."""
        _, h = self.rnn(self.emb(x))
        scores: Tensor = self.out(h[-1])
        return scores


@program(
    "text",
    "softmax-axis",
    "zero-gradient",
    "suspicious-perfection",
    story="One name at a time, and log_softmax over dim=0: the only row of the output always has probability one.",
    source="https://runebook.dev/en/docs/pytorch/generated/torch.nn.softmax",
    loss_tells=False,
)
def softmax_over_the_only_name(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = names(seed), Letters()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.nll_loss(F.log_softmax(model(batch[0]), dim=0 if faulty else 1), batch[1]),
        batches=tuples(data.x, data.y, size=1, seed=seed),
        num_steps=600,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "text",
    "regularisation-too-strong",
    story="A penalty on the squares of all weights is added by hand, summed instead of averaged.",
)
def penalty_on_every_weight(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = names(seed), Letters()
    strength = 0.05 if faulty else 1e-6

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        l2 = torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
        return F.cross_entropy(model(batch[0]), batch[1]) + strength * l2

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tagging",
    "labels-shuffled",
    story="The tokenizer puts a start token before the words, and the tags are not shifted with them.",
)
def start_token_shifts_the_tags(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    words = sentences(seed).x
    tags = torch.bucketize(words, torch.tensor([0, 40, 55]))  # padding, neutral, good, bad
    ids = torch.cat([torch.full((len(words), 1), 71), words[:, :-1]], dim=1)
    shifted = torch.cat([torch.zeros(len(words), 1, dtype=torch.long), tags[:, :-1]], dim=1)
    labels = (tags if faulty else shifted).masked_fill(ids == 0, -100)
    model = nn.Sequential(nn.Embedding(72, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    cut = 900

    def score() -> float:
        with evaluating(model):
            guess = model(ids[cut:]).argmax(-1)
        seen = shifted[cut:] > 1  # the words that carry a tag
        return float((guess == shifted[cut:])[seen].float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"]),
        batches=dicts({"ids": ids[:cut], "labels": labels[:cut]}, size=32, seed=seed),
        num_steps=200,
        score=score,
    )


class _CharLM(nn.Module):
    """Predicts the next letter at every position; `causal` hides the letters to come."""

    def __init__(self, *, causal: bool, width: int = 48) -> None:
        super().__init__()
        self.emb = nn.Embedding(len(LETTERS), width)
        self.pos = nn.Parameter(0.1 * torch.randn(1, 24, width))
        layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LETTERS))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        logits: Tensor = self.head(self.blocks(self.emb(x) + self.pos[:, :length], mask=mask))
        return logits


def _next_letter(model: nn.Module, x: Tensor) -> float:
    """Return how often the letter after a prefix is right, for prefixes of several lengths."""
    with evaluating(model):
        right = [(model(x[:, :n])[:, -1].argmax(1) == x[:, n]).float().mean() for n in (6, 11, 16, 21)]
    return float(torch.stack(right).mean())


@program(
    "language",
    "target-leak",
    "suspicious-perfection",
    story="The decoder is trained without a causal mask and copies the next letter from its input.",
    source="alex-matton/causal-transformer-decoder#1",
    loss_tells=False,
)
def decoder_sees_what_comes(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _CharLM(causal=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: _next_letter(model, data.x_test),
    )


@program(
    "language",
    "schedule-error",
    "learning-rate-too-low",
    story="The warm-up of a large recipe, 20,000 steps, is kept for a run of 250.",
)
def warm_up_longer_than_the_run(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _CharLM(causal=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    warm_up = 20_000 if faulty else 20
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: _next_letter(model, data.x_test),
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up)),
    )


TEXT = (
    lstm_ported_from_keras,
    same_logits_for_every_sentence,
    attention_mask_the_other_way,
    softmax_over_the_only_name,
    penalty_on_every_weight,
    start_token_shifts_the_tags,
    decoder_sees_what_comes,
    warm_up_longer_than_the_run,
)
