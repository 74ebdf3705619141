import torch
from torch import nn

model = nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = nn.CrossEntropyLoss()
for batch, (X, y) in enumerate(dataloader):
    pred = model(X)
    loss = loss_fn(pred, y)
    optimizer.zero_grad()
    optimizer.step()
    loss.backward()
    if batch % 100 == 0:
        print(f"loss: {loss.item():>7f}")
