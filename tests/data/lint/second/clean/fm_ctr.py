import json
from collections import OrderedDict

import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader

from criteo import ClickLog

FIELDS = json.load(open("field_dims.json"))


class FactorizationMachine(nn.Module):
    def __init__(self, field_dims, k=16):
        super().__init__()
        n = sum(field_dims)
        offsets = torch.tensor([0] + field_dims[:-1]).cumsum(0)
        self.register_buffer("offsets", offsets)
        self.linear = nn.Embedding(n, 1, sparse=True)
        self.factors = nn.Embedding(n, k, sparse=True)
        self.tower = nn.Sequential(OrderedDict(
            fc1=nn.Linear(k * len(field_dims), 256), act1=nn.ReLU(), drop=nn.Dropout(0.2), fc2=nn.Linear(256, 1)))
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.xavier_uniform_(self.factors.weight)

    def forward(self, x):
        x = x + self.offsets
        v = self.factors(x)
        pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1, keepdim=True)
        wide = self.linear(x).sum(1) + self.bias
        return (wide + pair + self.tower(v.flatten(1))).squeeze(1)


def make_optimizers(model):
    tables = [model.linear.weight, model.factors.weight]
    ids = {id(p) for p in tables}
    dense = [p for p in model.parameters() if id(p) not in ids]
    return {
        "sparse": torch.optim.SparseAdam(tables, lr=1e-2),
        "dense": torch.optim.Adam(dense, lr=1e-3),
    }


def auc(model, loader, device):
    model.eval()
    scores, labels = [], []
    with torch.inference_mode():
        for x, y in loader:
            scores.append(torch.sigmoid(model(x.to(device))).cpu())
            labels.append(y)
    return roc_auc_score(torch.cat(labels), torch.cat(scores))


def train():
    torch.manual_seed(2020)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    train_loader = DataLoader(ClickLog("train"), batch_size=4096, shuffle=True, num_workers=4)
    valid_loader = DataLoader(ClickLog("valid"), batch_size=8192)
    test_loader = DataLoader(ClickLog("test"), batch_size=8192)
    model = FactorizationMachine(FIELDS).to(device)
    optimizers = make_optimizers(model)
    bce = nn.BCEWithLogitsLoss()
    best, trials = 0.0, 0
    for epoch in range(10):
        model.train()
        for step, (x, y) in enumerate(train_loader):
            loss = bce(model(x.to(device)), y.float().to(device))
            for o in optimizers.values():
                o.zero_grad()
            loss.backward()
            for o in optimizers.values():
                o.step()
            if step % 200 == 0:
                print(epoch, step, f"{loss.item():.5f}")
        score = auc(model, valid_loader, device)
        print(f"epoch {epoch} valid auc {score:.5f}")
        if score > best:
            best, trials = score, 0
            torch.save(model.state_dict(), "fm.pt")
        else:
            trials += 1
            if trials == 2:
                break
    model.load_state_dict(torch.load("fm.pt"))
    print("test auc", auc(model, test_loader, device))


if __name__ == "__main__":
    train()
