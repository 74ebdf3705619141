import torch
import torch.nn.functional as F

from proteins import sequence_loaders
from esmlike import ProteinEncoder

AMP_DTYPE = torch.bfloat16


class Run:
    def __init__(self):
        self.net = ProteinEncoder(layers=12, dim=480).cuda()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=4e-4, betas=(0.9, 0.98), weight_decay=0.01)
        self.scaler = torch.amp.GradScaler("cuda")
        self.train_dl, self.val_dl = sequence_loaders(batch=64)

    def masked_loss(self, batch):
        tokens, targets = batch["tokens"].cuda(), batch["targets"].cuda()
        with torch.autocast("cuda", dtype=AMP_DTYPE):
            logits = self.net(tokens)
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)

    def epoch(self):
        self.net.train()
        for batch in self.train_dl:
            self.opt.zero_grad(set_to_none=True)
            loss = self.masked_loss(batch)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.opt)
            self.scaler.update()

    def validate(self):
        self.net.eval()
        with torch.no_grad():
            vals = [self.masked_loss(b).item() for b in self.val_dl]
        return sum(vals) / len(vals)


if __name__ == "__main__":
    run = Run()
    for ep in range(30):
        run.epoch()
        print(ep, run.validate())
