import torch
from torch import nn

torch.manual_seed(0)
SEQ, BATCH, HIDDEN, EPOCHS = 64, 20, 256, 12


class CharLSTM(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.emb = nn.Embedding(vocab, 128)
        self.rnn = nn.LSTM(128, HIDDEN, num_layers=2, dropout=0.3)
        self.out = nn.Linear(HIDDEN, vocab)

    def forward(self, x, state):
        y, state = self.rnn(self.emb(x), state)
        return self.out(y), state

    def init_state(self, n):
        w = next(self.parameters())
        return w.new_zeros(2, n, HIDDEN), w.new_zeros(2, n, HIDDEN)


def batchify(ids, n):
    usable = len(ids) // n * n
    return ids[:usable].view(n, -1).t().contiguous()


def chunks(data):
    for i in range(0, data.size(0) - 1, SEQ):
        k = min(SEQ, data.size(0) - 1 - i)
        yield data[i:i + k], data[i + 1:i + 1 + k]


def main():
    text = open("input.txt").read()
    chars = sorted(set(text))
    lookup = {c: i for i, c in enumerate(chars)}
    ids = torch.tensor([lookup[c] for c in text])
    cut = int(0.9 * len(ids))
    train_data, val_data = batchify(ids[:cut], BATCH), batchify(ids[cut:], BATCH)
    model = CharLSTM(len(chars))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(EPOCHS):
        model.train()
        state = model.init_state(BATCH)
        for x, y in chunks(train_data):
            state = tuple(s.detach() for s in state)
            logits, state = model(x, state)
            loss = criterion(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()

        model.eval()
        total, count = 0.0, 0
        state = model.init_state(BATCH)
        with torch.no_grad():
            for x, y in chunks(val_data):
                logits, state = model(x, state)
                total += criterion(logits.flatten(0, 1), y.flatten()).item() * y.numel()
                count += y.numel()
        print(f"epoch {epoch} val nll {total / count:.3f}")


if __name__ == "__main__":
    main()
