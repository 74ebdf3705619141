"""Customer churn MLP: trains in float32, scores in float16 on GPU."""
import copy

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


class MLP(nn.Module):
    def __init__(self, d, widths=(256, 128), p=0.3):
        super().__init__()
        layers = []
        for w in widths:
            layers += [nn.Linear(d, w), nn.BatchNorm1d(w), nn.SiLU(), nn.Dropout(p)]
            d = w
        self.body, self.out = nn.Sequential(*layers), nn.Linear(d, 2)

    def forward(self, x):
        return self.out(self.body(x))


def predict(model, X, dev):
    half = copy.deepcopy(model).eval()
    dt = torch.float32
    if dev.type == "cuda":
        half, dt = half.half(), torch.float16
    with torch.inference_mode():
        chunks = [half(c.to(dev, dt)).float().softmax(1)[:, 1].cpu() for c in torch.from_numpy(X).split(4096)]
    return torch.cat(chunks).numpy()


def fit_fold(Xt, yt, Xv, yv, dev, epochs=60, patience=8):
    w = np.where(yt == 1, 1 / (yt == 1).mean(), 1.0)
    dl = DataLoader(TensorDataset(torch.from_numpy(Xt), torch.from_numpy(yt)), 512,
                    sampler=WeightedRandomSampler(w.tolist(), len(yt)), drop_last=True)
    model = MLP(Xt.shape[1]).to(dev)
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    criterion = nn.CrossEntropyLoss()
    best, wait, keep = -1.0, 0, None
    for epoch in range(epochs):
        model.train()
        epoch_loss = []
        for xb, yb in dl:
            optimizer.zero_grad()
            loss = criterion(model(xb.to(dev)), yb.to(dev))
            loss.backward()
            optimizer.step()
            epoch_loss.append(loss.detach())
        scheduler.step()
        ap = average_precision_score(yv, predict(model, Xv, dev))
        print(f"  {epoch:02d} loss {torch.stack(epoch_loss).mean().item():.4f} AP {ap:.4f}")
        if ap > best:
            best, wait, keep = ap, 0, copy.deepcopy(model.state_dict())
        elif (wait := wait + 1) >= patience:
            break
    model.load_state_dict(keep)
    return model, best


def main():
    torch.manual_seed(2)
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    df = pd.get_dummies(pd.read_csv("churn.csv"))
    y = df.pop("Churn_Yes").to_numpy().astype(np.int64)
    X = df.drop(columns=["Churn_No"]).to_numpy(np.float32)
    scores = []
    for k, (a, b) in enumerate(StratifiedKFold(5, shuffle=True, random_state=0).split(X, y)):
        print("fold", k)
        sc = StandardScaler().fit(X[a])
        model, s = fit_fold(sc.transform(X[a]).astype(np.float32), y[a], sc.transform(X[b]).astype(np.float32), y[b], dev)
        scores.append(s)
        torch.save(model.state_dict(), f"churn_{k}.pt")
    print("AP", np.mean(scores), "+-", np.std(scores))


if __name__ == "__main__":
    main()
