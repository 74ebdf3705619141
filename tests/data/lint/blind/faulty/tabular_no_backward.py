import torch
from torch import nn
from torch.utils.data import DataLoader

from credit import CreditData


class ResBlock(nn.Module):
    def __init__(self, d, p=0.1):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.ReLU(), nn.Dropout(p), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.block(x)


def build(d_in, d=128, depth=3):
    return nn.Sequential(nn.Linear(d_in, d), *[ResBlock(d) for _ in range(depth)], nn.Linear(d, 2))


def main():
    train_set, valid_set = CreditData("train"), CreditData("valid")
    train_dl = DataLoader(train_set, batch_size=512, shuffle=True)
    valid_dl = DataLoader(valid_set, batch_size=2048)
    model = build(train_set.n_features)
    criterion = nn.CrossEntropyLoss(weight=train_set.class_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(30):
        model.train()
        running = 0.0
        for features, label in train_dl:
            optimizer.zero_grad()
            logits = model(features)
            loss = criterion(logits, label)
            optimizer.step()
            running += loss.item()

        model.eval()
        correct = 0
        with torch.no_grad():
            for features, label in valid_dl:
                correct += (model(features).argmax(1) == label).sum().item()
        print(f"epoch {epoch} loss {running / len(train_dl):.4f} acc {correct / len(valid_set):.4f}")


if __name__ == "__main__":
    main()
