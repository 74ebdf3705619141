import pandas as pd
import torch
import torch.nn as nn
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.preprocessing import LabelEncoder, MinMaxScaler
from torch.utils.data import DataLoader, TensorDataset

CAT = [f"C{i}" for i in range(1, 27)]
NUM = [f"I{i}" for i in range(1, 14)]


def load(path):
    df = pd.read_csv(path)
    df[CAT] = df[CAT].fillna("-1")
    df[NUM] = df[NUM].fillna(0)
    for c in CAT:
        df[c] = LabelEncoder().fit_transform(df[c])
    cut = int(0.9 * len(df))
    mm = MinMaxScaler().fit(df[NUM].iloc[:cut])
    df[NUM] = mm.transform(df[NUM])
    dims = [int(df[c].max()) + 1 for c in CAT]
    tensors = [torch.tensor(df[CAT].values).long(), torch.tensor(df[NUM].values).float(),
               torch.tensor(df["label"].values).float()]
    return dims, TensorDataset(*[t[:cut] for t in tensors]), TensorDataset(*[t[cut:] for t in tensors])


class DCN(nn.Module):
    def __init__(self, dims, d=16, n_cross=3):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, d) for n in dims)
        width = d * len(dims) + len(NUM)
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(n_cross))
        self.deep = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 64), nn.ReLU())
        self.final = nn.Linear(width + 64, 1)

    def forward(self, cat, num):
        x0 = torch.cat([t(cat[:, i]) for i, t in enumerate(self.tables)] + [num], 1)
        x = x0
        for layer in self.cross:
            x = x0 * layer(x) + x
        return torch.sigmoid(self.final(torch.cat([x, self.deep(x0)], 1))).squeeze(1)


def report(model, loader, device):
    model.eval()
    p, y = [], []
    with torch.no_grad():
        for cat, num, label in loader:
            p.append(model(cat.to(device), num.to(device)).cpu())
            y.append(label)
    p, y = torch.cat(p).numpy(), torch.cat(y).numpy()
    return roc_auc_score(y, p), log_loss(y, p)


if __name__ == "__main__":
    torch.manual_seed(1024)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    dims, train_ds, valid_ds = load("criteo_sample.csv")
    train_dl = DataLoader(train_ds, 256, shuffle=True)
    valid_dl = DataLoader(valid_ds, 1024)
    model = DCN(dims).to(device)
    criterion = nn.BCEWithLogitsLoss()
    optim = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    for epoch in range(10):
        model.train()
        total = 0.0
        for cat, num, label in train_dl:
            pred = model(cat.to(device), num.to(device))
            loss = criterion(pred, label.to(device))
            optim.zero_grad()
            loss.backward()
            optim.step()
            total += loss.item()
        auc, ll = report(model, valid_dl, device)
        print(f"epoch {epoch}: loss {total / len(train_dl):.4f} auc {auc:.4f} logloss {ll:.4f}")
