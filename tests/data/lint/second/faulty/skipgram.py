import collections
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

WINDOW, DIM, NEG, BATCH, EPOCHS = 5, 100, 5, 1024, 5


def read_corpus(path, min_count=5):
    with open(path) as f:
        words = f.read().split()
    counts = collections.Counter(words)
    vocab = [w for w, c in counts.most_common() if c >= min_count]
    index = {w: i for i, w in enumerate(vocab)}
    freq = torch.tensor([counts[w] for w in vocab], dtype=torch.float)
    return [index[w] for w in words if w in index], vocab, freq


def pairs(ids):
    out = []
    for i, c in enumerate(ids):
        w = random.randint(1, WINDOW)
        for j in range(max(0, i - w), min(len(ids), i + w + 1)):
            if j != i:
                out.append((c, ids[j]))
    random.shuffle(out)
    return torch.tensor(out)


class SkipGram(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.inp, self.out = nn.Embedding(n, d), nn.Embedding(n, d)
        nn.init.uniform_(self.inp.weight, -0.5 / d, 0.5 / d)
        nn.init.zeros_(self.out.weight)

    def forward(self, c, o, neg):
        v = self.inp(c)
        pos = F.logsigmoid((v * self.out(o)).sum(-1))
        bad = F.logsigmoid(-torch.bmm(self.out(neg), v.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return -(pos + bad).mean()


def nearest(model, vocab, word, k=8):
    with torch.no_grad():
        e = F.normalize(model.inp.weight, dim=-1)
        s = e @ e[vocab.index(word)]
    return [vocab[i] for i in s.topk(k + 1).indices[1:].tolist()]


def main():
    random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, vocab, freq = read_corpus("text8")
    noise = freq.pow(0.75)
    model = SkipGram(len(vocab), DIM).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        data = pairs(ids)
        epoch_loss = 0
        for chunk in data.split(BATCH):
            c, o = chunk.to(device).t()
            neg = torch.multinomial(noise, len(c) * NEG, replacement=True).view(-1, NEG).to(device)
            loss = model(c, o, neg)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss += loss
        print(f"epoch {epoch} loss {epoch_loss.item() * BATCH / len(data):.4f}", nearest(model, vocab, "king"))
    torch.save({"vocab": vocab, "vectors": model.inp.weight.detach().cpu()}, "vectors.pt")


if __name__ == "__main__":
    main()
