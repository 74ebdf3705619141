import sys

import torch
import torch.nn as nn

HID, SEQ, BATCH, STEPS = 512, 100, 64, 20000


class Poet(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.emb = nn.Embedding(n, 64)
        self.lstm = nn.LSTM(64, HID, 2, dropout=0.3, batch_first=True)
        self.fc = nn.Linear(HID, n)

    def forward(self, x, state=None):
        o, state = self.lstm(self.emb(x), state)
        return self.fc(o), state


def batch(data):
    i = torch.randint(0, len(data) - SEQ - 1, (BATCH,))
    x = torch.stack([data[k:k + SEQ] for k in i])
    y = torch.stack([data[k + 1:k + SEQ + 1] for k in i])
    return x, y


@torch.no_grad()
def sample(model, stoi, itos, prompt="The ", n=300, temp=0.8):
    model.eval()
    x = torch.tensor([[stoi[c] for c in prompt]])
    text, state = prompt, None
    for _ in range(n):
        logits, state = model(x, state)
        p = torch.softmax(logits[0, -1] / temp, -1)
        x = torch.multinomial(p, 1).view(1, 1)
        text += itos[x.item()]
    model.train()
    return text


@torch.no_grad()
def held_out_loss(model, data, criterion, n=20):
    model.eval()
    tot = 0.0
    for _ in range(n):
        x, y = batch(data)
        tot += criterion(model(x)[0].flatten(0, 1), y.flatten()).item()
    model.train()
    return tot / n


def main(path):
    torch.manual_seed(42)
    text = open(path, encoding="utf-8").read()
    chars = sorted(set(text))
    stoi, itos = {c: i for i, c in enumerate(chars)}, dict(enumerate(chars))
    ids = torch.tensor([stoi[c] for c in text])
    cut = int(0.9 * len(ids))
    train, val = ids[:cut], ids[cut:]
    model = Poet(len(chars))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 5000, 0.5)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for step in range(1, STEPS + 1):
        x, y = batch(train)
        logits, _ = model(x)
        loss = criterion(logits.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        sched.step()
        if step % 500 == 0:
            print(step, f"train {loss.item():.3f} val {held_out_loss(model, val, criterion):.3f}")
            print(sample(model, stoi, itos))


if __name__ == "__main__":
    main(sys.argv[1])
