import torch
import torch.nn.functional as F


def main(net, loader):
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=10)
    for epoch in range(30):
        net.train()
        for imgs, masks in loader:
            pred = net(imgs)
            loss = F.binary_cross_entropy_with_logits(pred, masks)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            net.zero_grad()
            opt.step()
        sched.step()
