import argparse

import numpy as np
import torch
from seqeval.metrics import f1_score
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForTokenClassification, AutoTokenizer

from conll import Conll2003, LABELS, align


def to_device(batch, device):
    return {k: v.to(device) for k, v in batch.items()}


def predict(model, loader, device):
    model.eval()
    gold, pred = [], []
    with torch.inference_mode():
        for batch in loader:
            logits = model(**to_device(batch, device)).logits.argmax(-1).cpu().numpy()
            labels = batch["labels"].numpy()
            for g, p in zip(labels, logits):
                keep = g != -100
                gold.append([LABELS[k] for k in g[keep]])
                pred.append([LABELS[k] for k in p[keep]])
    model.train()
    return f1_score(gold, pred)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default="bert-base-cased")
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=3e-5)
    parser.add_argument("--num_train_epochs", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    args = parser.parse_args()

    np.random.seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tok = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForTokenClassification.from_pretrained(args.model_name_or_path, num_labels=len(LABELS)).to(device)
    collate = align(tok)
    train_loader = DataLoader(Conll2003("train"), args.train_batch_size, shuffle=True, collate_fn=collate)
    dev_loader = DataLoader(Conll2003("dev"), 32, collate_fn=collate)

    optimizer = AdamW(model.parameters(), lr=args.learning_rate)
    updates = len(train_loader) // args.gradient_accumulation_steps * args.num_train_epochs
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=updates)

    model.train()
    global_step = 0
    for epoch in range(args.num_train_epochs):
        tr_loss = 0.0
        for step, batch in enumerate(train_loader):
            loss = model(**to_device(batch, device)).loss
            loss.backward()
            tr_loss += loss.item()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
                global_step += 1
        print(f"epoch {epoch} step {global_step} loss {tr_loss / len(train_loader):.4f} "
              f"dev f1 {predict(model, dev_loader, device):.4f}")
    model.save_pretrained("ner-out")


if __name__ == "__main__":
    main()
