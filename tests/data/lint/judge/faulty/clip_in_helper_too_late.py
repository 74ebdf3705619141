import torch


class Runner:
    def __init__(self, model, cfg):
        self.model = model
        self.cfg = cfg
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    def _update(self):
        self.optimizer.step()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
        self.optimizer.zero_grad()

    def train(self, loader):
        self.model.train()
        for batch in loader:
            loss = self.model(batch)
            loss.backward()
            self._update()
