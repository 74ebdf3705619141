import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

from wiki_sentences import Sentences, sts_dev


class Encoder(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.lm = AutoModel.from_pretrained(name)
        self.mlp = nn.Sequential(nn.Linear(self.lm.config.hidden_size, self.lm.config.hidden_size), nn.Tanh())

    def forward(self, input_ids, attention_mask):
        cls = self.lm(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        return self.mlp(cls) if self.training else cls


def info_nce(a, b, tau=0.05):
    sim = F.cosine_similarity(a.unsqueeze(1), b.unsqueeze(0), dim=-1) / tau
    return F.cross_entropy(sim, torch.arange(len(a), device=a.device))


@torch.inference_mode()
def dev_correlation(model, tok, device):
    model.eval()
    sims, gold = [], []
    for a, b, score in sts_dev(batch=64):
        ea, eb = (model(**tok(s, padding=True, truncation=True, return_tensors="pt").to(device)) for s in (a, b))
        sims.append(F.cosine_similarity(ea, eb).cpu())
        gold.append(score)
    x, y = torch.cat(sims).argsort().argsort().float(), torch.cat(gold).argsort().argsort().float()
    model.train()
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--name", default="bert-base-uncased")
    ap.add_argument("--lr", type=float, default=3e-5)
    ap.add_argument("--batch_size", type=int, default=64)
    ap.add_argument("--eval_every", type=int, default=250)
    args = ap.parse_args()
    accelerator = Accelerator()
    torch.manual_seed(42)
    tok = AutoTokenizer.from_pretrained(args.name)

    def collate(lines):
        return tok(lines, padding=True, truncation=True, max_length=32, return_tensors="pt")

    loader = DataLoader(Sentences("wiki1m.txt"), args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    model = Encoder(args.name)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    best = -1.0
    model.train()
    for step, batch in enumerate(loader, 1):
        ids, att = batch["input_ids"], batch["attention_mask"]
        z = model(torch.cat([ids, ids]), torch.cat([att, att]))
        a, b = z.chunk(2)
        loss = info_nce(a, b)
        opt.zero_grad()
        accelerator.backward(loss, retain_graph=True)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % args.eval_every == 0 and accelerator.is_main_process:
            rho = dev_correlation(accelerator.unwrap_model(model), tok, accelerator.device)
            print(f"step {step} loss {loss.item():.4f} dev {rho:.4f}")
            if rho > best:
                best = rho
                accelerator.unwrap_model(model).lm.save_pretrained("simcse-out")


if __name__ == "__main__":
    main()
