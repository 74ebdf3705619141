# Adult census income, entity embeddings
import pandas as pd
import torch
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

df = pd.read_csv("adult.csv")
target = (df.pop("income") == ">50K").astype("float32").values
cat_cols = df.select_dtypes("object").columns.tolist()
num_cols = [c for c in df.columns if c not in cat_cols]
codes = df[cat_cols].apply(lambda c: c.astype("category").cat.codes).astype("int64").values
cards = [int(codes[:, j].max()) + 1 for j in range(codes.shape[1])]
tr_idx, va_idx = train_test_split(range(len(df)), test_size=0.2, random_state=0, stratify=target)
scaler = StandardScaler().fit(df[num_cols].values[tr_idx])
nums = scaler.transform(df[num_cols].values).astype("float32")


def make_loader(idx, shuffle):
    ds = TensorDataset(*(torch.from_numpy(a[idx]) for a in (codes, nums, target)))
    return DataLoader(ds, batch_size=512, shuffle=shuffle)


train_loader, val_loader = make_loader(tr_idx, True), make_loader(va_idx, False)


class EntityNet(nn.Module):
    def __init__(self, cards, n_num):
        super().__init__()
        dims = [min(32, (c + 1) // 2) for c in cards]
        self.embs = nn.ModuleList(nn.Embedding(c, d) for c, d in zip(cards, dims))
        self.bn = nn.BatchNorm1d(n_num)
        self.mlp = nn.Sequential(nn.Linear(sum(dims) + n_num, 200), nn.ReLU(), nn.Dropout(0.2),
                                 nn.Linear(200, 50), nn.ReLU(), nn.Linear(50, 1))

    def forward(self, c, x):
        e = torch.cat([m(c[:, i]) for i, m in enumerate(self.embs)], 1)
        return self.mlp(torch.cat([e, self.bn(x)], 1)).squeeze(1)


device = "cuda" if torch.cuda.is_available() else "cpu"
model = EntityNet(cards, nums.shape[1]).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
loss_fn = nn.BCEWithLogitsLoss()

for epoch in range(15):
    model.train()
    train_loss = 0.0
    for c, x, y in train_loader:
        c, x, y = c.to(device), x.to(device), y.to(device)
        logits = model(c, x)
        loss = loss_fn(logits, y)
        loss.backward()
        optimizer.step()
        train_loss += loss.item() * len(y)
    scheduler.step()

    model.eval()
    correct, val_loss = 0, 0.0
    with torch.no_grad():
        for c, x, y in val_loader:
            c, x, y = c.to(device), x.to(device), y.to(device)
            logits = model(c, x)
            val_loss += loss_fn(logits, y).item() * len(y)
            correct += ((logits > 0).float() == y).sum().item()
    print(f"epoch {epoch + 1}: train {train_loss / len(tr_idx):.4f} val {val_loss / len(va_idx):.4f} acc {correct / len(va_idx):.4f}")
