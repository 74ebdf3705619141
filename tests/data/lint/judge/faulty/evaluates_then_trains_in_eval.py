import torch


@torch.no_grad()
def validation_loss(model, loader):
    model.eval()
    total = 0.0
    for batch in loader:
        total += model(**batch).loss.item()
    return total / len(loader)


def train(model, train_loader, val_loader, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model.train()
    for step, batch in enumerate(train_loader):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 500 == 0:
            print(step, validation_loss(model, val_loader))
