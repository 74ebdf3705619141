import copy

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset


class GatedMLP(nn.Module):
    def __init__(self, d, h=128):
        super().__init__()
        self.bn = nn.BatchNorm1d(d)
        self.gate = nn.Sequential(nn.Linear(d, d), nn.Sigmoid())
        self.f = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Dropout(0.25), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))

    def forward(self, x):
        x = self.bn(x)
        return self.f(x * self.gate(x)).squeeze(-1)


class Experiment:
    def __init__(self, csv, seed=0):
        torch.manual_seed(seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        df = pd.read_csv(csv)
        y = (df.pop("RiskPerformance") == "Bad").to_numpy(np.float32)
        X = df.to_numpy(np.float32)
        Xt, Xh, yt, yh = train_test_split(X, y, test_size=0.3, random_state=seed, stratify=y)
        Xv, Xs, yv, ys = train_test_split(Xh, yh, test_size=0.5, random_state=seed, stratify=yh)
        self.train_loader = self._loader(Xt, yt, True)
        self.val_loader = self._loader(Xv, yv, False)
        self.test_loader = self._loader(Xs, ys, False)
        self.model = GatedMLP(X.shape[1]).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss_fn = nn.BCEWithLogitsLoss()

    @staticmethod
    def _loader(X, y, shuffle):
        return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(y)), 256, shuffle=shuffle)

    def _train_epoch(self):
        self.model.train()
        tot = 0.0
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(x.to(self.device)), y.to(self.device))
            loss.backward()
            self.optimizer.step()
            tot += loss.item()
        return tot / len(self.train_loader)

    @torch.no_grad()
    def auc(self, loader):
        self.model.eval()
        p, t = zip(*[(torch.sigmoid(self.model(x.to(self.device))).cpu(), y) for x, y in loader])
        return roc_auc_score(torch.cat(t).numpy(), torch.cat(p).numpy())

    def run(self, epochs=200, patience=15):
        best_auc, wait, best_state = 0.0, 0, None
        for epoch in range(epochs):
            loss = self._train_epoch()
            val_auc = self.auc(self.train_loader)
            print(f"epoch {epoch:3d} | loss {loss:.4f} | val auc {val_auc:.4f}")
            if val_auc > best_auc:
                best_auc, wait = val_auc, 0
                best_state = copy.deepcopy(self.model.state_dict())
            else:
                wait += 1
                if wait >= patience:
                    print("early stop")
                    break
        self.model.load_state_dict(best_state)
        print(f"test auc {self.auc(self.test_loader):.4f}")


if __name__ == "__main__":
    Experiment("heloc.csv").run()
