import torch
import torch.nn.functional as F

from bpe import token_stream
from nanomodel import Decoder

steps, eval_interval, batch_size, ctx = 20_000, 500, 24, 512
device = "cuda"
train_ids, val_ids = token_stream("train"), token_stream("val")


def batch(ids):
    starts = torch.randint(0, len(ids) - ctx - 1, (batch_size,))
    window = torch.stack([ids[s:s + ctx + 1] for s in starts]).to(device)
    return window[:, :-1], window[:, 1:]


def loss_of(model, ids):
    x, y = batch(ids)
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@torch.no_grad()
def val_loss(model, n=40):
    model.eval()
    return sum(loss_of(model, val_ids).item() for _ in range(n)) / n


def main():
    torch.manual_seed(1337)
    model = Decoder(layers=8, heads=8, width=512, dropout=0.1).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps, eta_min=3e-5)
    model.train()
    for step in range(steps):
        if step % eval_interval == 0:
            print(f"step {step} val {val_loss(model):.4f}")
        loss = loss_of(model, train_ids)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
    torch.save(model.state_dict(), "gpt.pt")


if __name__ == "__main__":
    main()
