import torch

scaler = torch.cuda.amp.GradScaler()


def train_step(model, optimizer, batch, criterion):
    x, y = batch
    optimizer.zero_grad()
    with torch.cuda.amp.autocast():
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return loss.item()


def train(model, optimizer, loader, criterion):
    model.train()
    for batch in loader:
        print(train_step(model, optimizer, batch, criterion))
