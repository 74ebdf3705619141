"""Toxic comment classifier; reports the generalisation gap every epoch."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Subset

from comments import Comments


class GRUClassifier(nn.Module):
    def __init__(self, vocab, n_out=6, d=128):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.gru = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Dropout(0.4), nn.Linear(2 * d, n_out))

    def forward(self, ids):
        h, _ = self.gru(self.emb(ids))
        return self.head(h.amax(1))

    def predict_proba(self, ids):
        return torch.sigmoid(self(ids))


class eval_mode:
    """with eval_mode(net): evaluation mode and no autograd inside, previous mode afterwards."""

    def __init__(self, net):
        self.net = net

    def __enter__(self):
        self.was = self.net.training
        self.net.eval()
        self.guard = torch.no_grad()
        self.guard.__enter__()

    def __exit__(self, *exc):
        self.guard.__exit__(*exc)
        self.net.train(self.was)


def mean_loss(net, loader, criterion, device):
    total, n = 0.0, 0
    with eval_mode(net):
        for ids, y in loader:
            total += criterion(net(ids.to(device)), y.float().to(device)).item() * len(y)
            n += len(y)
    return total / n


def main():
    torch.manual_seed(77)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_ds, val_ds = Comments("train"), Comments("val")
    train_loader = DataLoader(train_ds, 256, shuffle=True)
    probe_loader = DataLoader(Subset(train_ds, range(len(val_ds))), 512)
    val_loader = DataLoader(val_ds, 512)
    net = GRUClassifier(train_ds.vocab_size).to(device)
    pos_weight = train_ds.negative_to_positive_ratio().to(device)
    criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
    opt = torch.optim.NAdam(net.parameters(), lr=2e-3)
    best, wait = float("inf"), 0
    net.train()
    for epoch in range(40):
        for ids, y in train_loader:
            opt.zero_grad()
            loss = criterion(net(ids.to(device)), y.float().to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), max_norm=3.0)
            opt.step()
        fit = mean_loss(net, probe_loader, criterion, device)
        val = mean_loss(net, val_loader, criterion, device)
        print(f"{epoch:02d} train {fit:.4f} val {val:.4f} gap {val - fit:+.4f}")
        if val < best - 1e-4:
            best, wait = val, 0
            torch.save(net.state_dict(), "toxic.pt")
        else:
            wait += 1
            if wait >= 4:
                print("no improvement, stop")
                break


if __name__ == "__main__":
    main()
