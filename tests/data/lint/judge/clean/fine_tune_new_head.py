import torch
from torch import nn
from torchvision.models import efficientnet_b0

model = efficientnet_b0(weights="DEFAULT")
for p in model.parameters():
    p.requires_grad = False
model.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 5))
model = model.to("cuda")
optimizer = torch.optim.Adam(model.classifier.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()


def run_epoch(loader, train):
    model.train() if train else model.eval()
    total = hits = n = 0
    with torch.set_grad_enabled(train):
        for x, y in loader:
            x, y = x.to("cuda"), y.to("cuda")
            logits = model(x)
            loss = criterion(logits, y)
            if train:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * len(y)
            hits += (logits.argmax(1) == y).sum().item()
            n += len(y)
    return total / n, hits / n


for epoch in range(20):
    print(epoch, run_epoch(train_loader, True), run_epoch(val_loader, False))
