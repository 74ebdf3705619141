import torch


class Experiment:
    def __init__(self, model, train_dl, lr=1e-3):
        self.model = model
        self.train_dl = train_dl
        self.criterion = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def train_batch(self, x, y):
        logits = self.model(x)
        loss = self.criterion(logits, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss)

    def run(self, epochs):
        for _ in range(epochs):
            self.model.train()
            for x, y in self.train_dl:
                self.train_batch(x, y)
