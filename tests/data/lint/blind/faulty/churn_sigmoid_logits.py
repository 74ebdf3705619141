import torch
from torch import nn
from torch.utils.data import DataLoader
from torcheval.metrics.functional import binary_auroc

from churn import ChurnTable


class ChurnMLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.score = nn.Linear(32, 1)

    def forward(self, x):
        return self.score(self.hidden(x)).squeeze(1)


def main():
    train_set, valid_set = ChurnTable("train"), ChurnTable("valid")
    train_dl = DataLoader(train_set, 256, shuffle=True)
    valid_dl = DataLoader(valid_set, 1024)
    model = ChurnMLP(train_set.n_features)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
    for epoch in range(40):
        model.train()
        for x, y in train_dl:
            probs = torch.sigmoid(model(x))
            loss = criterion(probs, y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        scores, labels = [], []
        with torch.no_grad():
            for x, y in valid_dl:
                scores.append(model(x))
                labels.append(y)
        auc = binary_auroc(torch.cat(scores), torch.cat(labels)).item()
        print(f"epoch {epoch}: auc {auc:.4f}")


if __name__ == "__main__":
    main()
