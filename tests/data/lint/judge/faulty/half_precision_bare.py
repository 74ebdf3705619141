import torch
from torch.cuda.amp import autocast


class Engine:
    def __init__(self, model, criterion):
        self.model = model.cuda()
        self.criterion = criterion
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def train_step(self, batch):
        self.opt.zero_grad(set_to_none=True)
        with autocast():
            out = self.model(batch["image"].cuda())
            loss = self.criterion(out, batch["label"].cuda())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        return loss.item()
