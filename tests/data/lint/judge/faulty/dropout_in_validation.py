import torch


class Trainer:
    def __init__(self, model, optimizer, loss_fn):
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn

    def train_epoch(self, loader):
        self.model.train()
        for x, y in loader:
            self.optimizer.zero_grad()
            self.loss_fn(self.model(x), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self, loader):
        losses = []
        for x, y in loader:
            losses.append(self.loss_fn(self.model(x), y).item())
        return sum(losses) / len(losses)

    def fit(self, train_dl, valid_dl, epochs):
        for _ in range(epochs):
            self.train_epoch(train_dl)
            print(self.validate(valid_dl))
