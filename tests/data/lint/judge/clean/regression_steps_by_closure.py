import torch


def closure_step(model, batch, loss_fn):
    x, y = batch
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss


def train(model, loader, loss_fn, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model.train()
    for epoch in range(epochs):
        running_loss, last_loss = 0.0, 0.0
        for i, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = closure_step(model, batch, loss_fn)
            optimizer.step()
            running_loss += loss.item()
            if i % 1000 == 999:
                last_loss = running_loss / 1000
                running_loss = 0.0
        print(epoch, last_loss)
