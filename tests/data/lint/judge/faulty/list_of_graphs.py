import torch


class Meter:
    pass


def run(model, loader, optimizer, criterion, log):
    model.train()
    total_loss = torch.zeros(1)
    for step, batch in enumerate(loader):
        out = model(batch["x"])
        loss = criterion(out, batch["y"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total_loss = total_loss + loss
        if step % 50 == 49:
            log(step, total_loss.item() / 50)
