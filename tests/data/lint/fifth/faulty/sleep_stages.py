"""Sleep staging from two EEG channels, 30 s epochs."""
import argparse

import numpy as np
import torch
import torch.nn as nn
from sklearn.metrics import cohen_kappa_score
from torch.utils.data import DataLoader, TensorDataset


class StageNet(nn.Module):
    def __init__(self, ch=2, n_stage=5, p=0.4):
        super().__init__()
        self.fine = self._branch(ch, 50, 6)
        self.coarse = self._branch(ch, 400, 50)
        self.mix = nn.LSTM(128, 96, batch_first=True, bidirectional=True)
        self.classify = nn.Sequential(nn.Dropout(p), nn.Linear(192, n_stage), nn.Softmax(dim=-1))

    @staticmethod
    def _branch(ch, k, s):
        return nn.Sequential(nn.Conv1d(ch, 64, k, s, k // 2), nn.BatchNorm1d(64), nn.ReLU(),
                             nn.Conv1d(64, 64, 7, 1, 3), nn.BatchNorm1d(64), nn.ReLU(), nn.AdaptiveAvgPool1d(16))

    def forward(self, x):
        z = torch.cat([self.fine(x), self.coarse(x)], 1).transpose(1, 2)
        h, _ = self.mix(z)
        return self.classify(h[:, -1])


def subject_split(npz, test_subjects):
    z = np.load(npz)
    is_test = np.isin(z["subject"], test_subjects)
    mk = lambda m: TensorDataset(torch.from_numpy(z["x"][m]).float(), torch.from_numpy(z["y"][m]).long())
    return mk(~is_test), mk(is_test), np.bincount(z["y"][~is_test], minlength=5)


def kappa(model, loader, device):
    model.eval()
    p, t = [], []
    with torch.no_grad():
        for x, y in loader:
            p.append(model(x.to(device)).argmax(-1).cpu())
            t.append(y)
    return cohen_kappa_score(torch.cat(t).numpy(), torch.cat(p).numpy())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--npz", default="sleepedf.npz")
    ap.add_argument("--test-subjects", type=int, nargs="+", default=[16, 17, 18, 19])
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--bs", type=int, default=128)
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tr, te, counts = subject_split(args.npz, args.test_subjects)
    weight = torch.tensor((counts.sum() / (5 * counts)) ** 0.5, dtype=torch.float32, device=device)
    train_dl, test_dl = DataLoader(tr, args.bs, shuffle=True, drop_last=True), DataLoader(te, 256)
    model = StageNet().to(device)
    criterion = nn.CrossEntropyLoss(weight=weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.96)
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for x, y in train_dl:
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
        scheduler.step()
        print(f"[{epoch:02d}] loss {total / len(train_dl):.4f} kappa {kappa(model, test_dl, device):.4f}")
    torch.save(model.state_dict(), "stagenet.pt")


if __name__ == "__main__":
    main()
