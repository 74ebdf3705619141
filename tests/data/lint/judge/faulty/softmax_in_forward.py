import torch
import torch.nn as nn
import torch.nn.functional as F


class Classifier(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        h = F.relu(self.conv(x)).mean(dim=(2, 3))
        return F.softmax(self.out(h), dim=-1)


model = Classifier(64, 10)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(loader):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
