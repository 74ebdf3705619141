# Transfer learning on Food-101 (notebook export)
import torch
import torch.nn as nn
import torchvision
from torch.utils.data import DataLoader
from torchvision import models

device = "cuda" if torch.cuda.is_available() else "cpu"

# --- data ---
weights = models.EfficientNet_B0_Weights.DEFAULT
tf = weights.transforms()
train_data = torchvision.datasets.Food101("data", split="train", transform=tf, download=True)
test_data = torchvision.datasets.Food101("data", split="test", transform=tf, download=True)
train_dl = DataLoader(train_data, batch_size=64, shuffle=True, num_workers=4)
test_dl = DataLoader(test_data, batch_size=64, num_workers=4)

# --- model ---
model = models.efficientnet_b0(weights=weights)
for param in model.features.parameters():
    param.requires_grad = False

loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.classifier.parameters(), lr=0.001)

model.classifier = nn.Sequential(
    nn.Dropout(p=0.2, inplace=True),
    nn.Linear(1280, len(train_data.classes)))
model = model.to(device)


# --- loops ---
def train_step():
    model.train()
    train_loss, train_acc = 0, 0
    for X, y in train_dl:
        X, y = X.to(device), y.to(device)
        y_logits = model(X)
        loss = loss_fn(y_logits, y)
        train_loss += loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        y_pred = torch.argmax(torch.softmax(y_logits, dim=1), dim=1)
        train_acc += (y_pred == y).sum().item() / len(y)
    return train_loss / len(train_dl), train_acc / len(train_dl)


def test_step():
    model.eval()
    test_loss, test_acc = 0, 0
    with torch.inference_mode():
        for X, y in test_dl:
            X, y = X.to(device), y.to(device)
            logits = model(X)
            test_loss += loss_fn(logits, y).item()
            test_acc += (logits.argmax(dim=1) == y).sum().item() / len(y)
    return test_loss / len(test_dl), test_acc / len(test_dl)


torch.manual_seed(42)
results = {"train_loss": [], "train_acc": [], "test_loss": [], "test_acc": []}
for epoch in range(5):
    tr_loss, tr_acc = train_step()
    te_loss, te_acc = test_step()
    for k, v in zip(results, (tr_loss, tr_acc, te_loss, te_acc)):
        results[k].append(v)
    print(f"Epoch {epoch + 1} | train {tr_loss:.4f}/{tr_acc:.4f} | test {te_loss:.4f}/{te_acc:.4f}")
torch.save(model.state_dict(), "food101.pt")
