import copy

import pandas as pd
import torch
import torch.nn as nn
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

df = pd.read_csv("titanic.csv")
df["Sex"] = (df["Sex"] == "female").astype(int)
df["Age"] = df["Age"].fillna(df["Age"].median())
cols = ["Pclass", "Sex", "Age", "SibSp", "Parch", "Fare"]
Xtr, Xva, ytr, yva = train_test_split(df[cols].values, df["Survived"].values, test_size=0.2, random_state=0)
sc = StandardScaler().fit(Xtr)


def to_ds(X, y):
    return TensorDataset(torch.tensor(sc.transform(X), dtype=torch.float32), torch.tensor(y, dtype=torch.float32))


train_dl = DataLoader(to_ds(Xtr, ytr), batch_size=32, shuffle=True)
val_dl = DataLoader(to_ds(Xva, yva), batch_size=256)

model = nn.Sequential(
    nn.Linear(len(cols), 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3),
    nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
pos_weight = torch.tensor((ytr == 0).sum() / (ytr == 1).sum(), dtype=torch.float32)
loss_fn = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
opt = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)


def validate():
    model.eval()
    tot, ok = 0.0, 0
    with torch.no_grad():
        for xb, yb in val_dl:
            z = model(xb).squeeze(1)
            tot += loss_fn(z, yb).item() * len(xb)
            ok += ((torch.sigmoid(z) > 0.5).float() == yb).sum().item()
    return tot / len(val_dl.dataset), ok / len(val_dl.dataset)


best_loss, best_state, wait = float("inf"), None, 0
for epoch in range(200):
    model.train()
    for xb, yb in train_dl:
        loss = loss_fn(model(xb).squeeze(1), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()

    vl, va = validate()
    if epoch % 10 == 0:
        print(f"{epoch:3d} val loss {vl:.4f} acc {va:.3f}")
    if vl < best_loss:
        best_loss, best_state, wait = vl, copy.deepcopy(model.state_dict()), 0
    else:
        wait += 1
    if wait >= 15:
        print("stopping at", epoch)
        break

model.load_state_dict(best_state)
torch.save(model.state_dict(), "titanic.pt")
