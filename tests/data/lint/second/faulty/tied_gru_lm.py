import os
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

SEQ, BATCH, EPOCHS = 64, 128, 8


def windows(path):
    ids = torch.load(path).long()
    n = (len(ids) - 1) // SEQ
    return TensorDataset(ids[:n * SEQ].view(n, SEQ), ids[1:n * SEQ + 1].view(n, SEQ))


class TiedGRU(nn.Module):
    def __init__(self, vocab, d=384):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, 2, batch_first=True, dropout=0.2)
        self.drop = nn.Dropout(0.2)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, x):
        h, _ = self.rnn(self.drop(self.emb(x)))
        return self.drop(h) @ self.emb.weight.t() + self.bias


def eval_ppl(model, dl, crit, device):
    model.eval()
    s, n = 0.0, 0
    with torch.no_grad():
        for x, y in dl:
            x, y = x.to(device), y.to(device)
            s += crit(model(x).flatten(0, 1), y.flatten()).item() * y.numel()
            n += y.numel()
    return 2.718281828 ** (s / n)


def main():
    torch.manual_seed(int(os.environ.get("SEED", 0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_dl = DataLoader(windows("wiki.train.pt"), BATCH, shuffle=True, drop_last=True)
    valid_dl = DataLoader(windows("wiki.valid.pt"), BATCH)
    model = TiedGRU(33278).to(device)
    crit = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train_dl))
    for epoch in range(EPOCHS):
        model.train()
        t0, running = time.time(), 0.0
        for i, (x, y) in enumerate(train_dl):
            x, y = x.to(device), y.to(device)
            loss = crit(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            running += loss.item()
            if i % 100 == 99:
                print(f"{epoch} {i + 1} loss {running / 100:.3f} {time.time() - t0:.1f}s")
                running = 0.0
            optimizer.zero_grad()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch} valid ppl {eval_ppl(model, valid_dl, crit, device):.2f}")
        torch.save(model.state_dict(), "tied_gru.pt")


if __name__ == "__main__":
    main()
