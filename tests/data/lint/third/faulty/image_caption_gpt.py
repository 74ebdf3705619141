import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from coco_feats import CaptionFeatures


class CaptionDecoder(nn.Module):
    def __init__(self, vocab=10000, d=512, layers=6, heads=8, max_len=40, feat=768):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.prefix = nn.Linear(feat, d)
        layer = nn.TransformerDecoderLayer(d, heads, 4 * d, 0.1, "gelu", batch_first=True, norm_first=True)
        self.dec = nn.TransformerDecoder(layer, layers)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, vocab, bias=False)

    def forward(self, feats, ids):
        T = ids.size(1)
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(T, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=ids.device)
        return self.out(self.norm(self.dec(x, self.prefix(feats), tgt_mask=mask)))


def configure_optimizer(model, lr, wd):
    linear, bias, norm_and_emb = [], [], []
    for name, mod in model.named_modules():
        for pn, p in mod.named_parameters(recurse=False):
            if isinstance(mod, (nn.LayerNorm, nn.Embedding)):
                norm_and_emb.append(p)
            elif pn.endswith("bias"):
                bias.append(p)
            else:
                linear.append(p)
    groups = [
        {"params": linear, "weight_decay": wd},
        {"params": norm_and_emb, "weight_decay": wd},
        {"params": bias, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def caption_loss(model, feats, ids, pad=0):
    logits = model(feats, ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=pad, label_smoothing=0.1)


@torch.no_grad()
def evaluate(model, dl, dev):
    model.eval()
    vals = [caption_loss(model, f.to(dev), i.to(dev)).item() for f, i in dl]
    model.train()
    return sum(vals) / len(vals)


def main(epochs=20, accum=2):
    dev = torch.device("cuda")
    tr = DataLoader(CaptionFeatures("train"), 64, shuffle=True, drop_last=True, num_workers=4)
    va = DataLoader(CaptionFeatures("val"), 64, num_workers=4)
    model = CaptionDecoder().to(dev)
    opt = configure_optimizer(model, 3e-4, 0.1)
    updates = epochs * (len(tr) // accum)
    sched = get_cosine_schedule_with_warmup(opt, 2000, updates)
    model.train()
    for ep in range(epochs):
        opt.zero_grad(set_to_none=True)
        for i, (f, ids) in enumerate(tr, 1):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = caption_loss(model, f.to(dev), ids.to(dev)) / accum
            loss.backward()
            if i % accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad(set_to_none=True)
            if i % 200 == 0:
                print(f"{ep}/{i} loss {loss.item() * accum:.3f}")
        print(f"epoch {ep} val {evaluate(model, va, dev):.4f}")
        torch.save(model.state_dict(), "captioner.pt")


if __name__ == "__main__":
    main()
