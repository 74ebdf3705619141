import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset


class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 10),
            nn.Softmax(dim=1),
        )

    def forward(self, x):
        return self.layers(x)


def tensors(x, y):
    return TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))


x, y = load_digits(return_X_y=True)
xtr, xte, ytr, yte = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
train_dl = DataLoader(tensors(xtr, ytr), batch_size=32, shuffle=True)
test_dl = DataLoader(tensors(xte, yte), batch_size=128)
model = DigitNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(30):
    model.train()
    for xb, yb in train_dl:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        acc = sum((model(xb).argmax(1) == yb).sum().item() for xb, yb in test_dl) / len(yte)
    print(f"epoch {epoch} accuracy {acc:.3f}")
