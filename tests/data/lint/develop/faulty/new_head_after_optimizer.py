import torch
from torch import nn
from torchvision.models import resnet18

model = resnet18(weights="DEFAULT")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model.fc = nn.Linear(512, 5)
criterion = nn.CrossEntropyLoss()
model.train()
for images, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
