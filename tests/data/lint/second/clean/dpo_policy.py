import copy
import json

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_constant_schedule_with_warmup

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
BETA = 0.1
LR = 5e-7
ACCUM = 8
EPOCHS = 1
device = "cuda"


def load_pairs(path):
    with open(path) as f:
        return [json.loads(l) for l in f]


def sequence_logp(model, ids, att, labels):
    logits = model(input_ids=ids, attention_mask=att).logits[:, :-1].float()
    targets = labels[:, 1:]
    keep = targets != -100
    logp = logits.log_softmax(-1).gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (logp * keep).sum(-1)


def dpo_loss(policy, reference, batch):
    pi_c = sequence_logp(policy, *batch["chosen"])
    pi_r = sequence_logp(policy, *batch["rejected"])
    with torch.no_grad():
        ref_c = sequence_logp(reference, *batch["chosen"])
        ref_r = sequence_logp(reference, *batch["rejected"])
    margin = BETA * ((pi_c - ref_c) - (pi_r - ref_r))
    return -F.logsigmoid(margin).mean(), (margin > 0).float().mean()


def make_collate(tok):
    def encode(prompt, answers):
        texts = [p + a + tok.eos_token for p, a in zip(prompt, answers)]
        enc = tok(texts, padding=True, truncation=True, max_length=768, return_tensors="pt")
        labels = enc.input_ids.masked_fill(enc.attention_mask == 0, -100)
        for row, p in enumerate(prompt):
            labels[row, :len(tok(p).input_ids)] = -100
        return enc.input_ids.to(device), enc.attention_mask.to(device), labels.to(device)

    def collate(rows):
        prompts = [r["prompt"] for r in rows]
        return {k: encode(prompts, [r[k] for r in rows]) for k in ("chosen", "rejected")}
    return collate


def main():
    torch.manual_seed(0)
    tok = AutoTokenizer.from_pretrained(MODEL, padding_side="right")
    policy = AutoModelForCausalLM.from_pretrained(MODEL).to(device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    collate = make_collate(tok)
    train_dl = DataLoader(load_pairs("prefs_train.jsonl"), 4, shuffle=True, drop_last=True, collate_fn=collate)
    dev_dl = DataLoader(load_pairs("prefs_dev.jsonl"), 4, collate_fn=collate)
    opt = torch.optim.RMSprop(policy.parameters(), lr=LR)
    sched = get_constant_schedule_with_warmup(opt, 150)

    for epoch in range(EPOCHS):
        policy.train()
        for i, batch in enumerate(train_dl):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss, acc = dpo_loss(policy, reference, batch)
            (loss / ACCUM).backward()
            if (i + 1) % ACCUM == 0:
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
                opt.step()
                sched.step()
                opt.zero_grad(set_to_none=True)
            if i % 50 == 0:
                print(f"{i} loss {loss.item():.4f} acc {acc.item():.2f}")
        policy.eval()
        with torch.no_grad():
            accs = [dpo_loss(policy, reference, b)[1].item() for b in dev_dl]
        print("dev preference accuracy", sum(accs) / len(accs))
    policy.save_pretrained("dpo-out")


if __name__ == "__main__":
    main()
