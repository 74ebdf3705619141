import argparse
import logging
import math

import nltk
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from datasets import load_dataset
from rouge_score import rouge_scorer
from torch.utils.data import DataLoader
from transformers import Adafactor, AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

logger = get_logger(__name__)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="t5-small")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--bs", type=int, default=8)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--max_steps", type=int, default=None)
    return p.parse_args()


def generate_and_score(accelerator, model, tok, loader):
    scorer = rouge_scorer.RougeScorer(["rougeLsum"], use_stemmer=True)
    scores = []
    model.eval()
    for batch in loader:
        with torch.no_grad():
            out = accelerator.unwrap_model(model).generate(
                batch["input_ids"], attention_mask=batch["attention_mask"], max_length=128, num_beams=4)
        out = accelerator.pad_across_processes(out, dim=1, pad_index=tok.pad_token_id)
        labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
        out, labels = accelerator.gather_for_metrics((out, labels))
        labels = np.where(labels.cpu().numpy() != -100, labels.cpu().numpy(), tok.pad_token_id)
        for hyp, ref in zip(tok.batch_decode(out, skip_special_tokens=True),
                            tok.batch_decode(labels, skip_special_tokens=True)):
            hyp, ref = "\n".join(nltk.sent_tokenize(hyp)), "\n".join(nltk.sent_tokenize(ref))
            scores.append(scorer.score(ref, hyp)["rougeLsum"].fmeasure)
    return float(np.mean(scores))


def main():
    args = parse()
    logging.basicConfig(level=logging.INFO)
    accelerator = Accelerator(gradient_accumulation_steps=args.accum, mixed_precision="no")
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    raw = load_dataset("cnn_dailymail", "3.0.0")

    def prep(ex):
        enc = tok(["summarize: " + a for a in ex["article"]], max_length=512, truncation=True)
        enc["labels"] = tok(text_target=ex["highlights"], max_length=128, truncation=True)["input_ids"]
        return enc

    ds = raw.map(prep, batched=True, remove_columns=raw["train"].column_names)
    coll = DataCollatorForSeq2Seq(tok, model=model, label_pad_token_id=-100)
    train_dl = DataLoader(ds["train"], args.bs, shuffle=True, collate_fn=coll)
    val_dl = DataLoader(ds["validation"], args.bs, collate_fn=coll)
    optimizer = Adafactor(model.parameters(), lr=args.lr, scale_parameter=False, relative_step=False)
    model, optimizer, train_dl, val_dl = accelerator.prepare(model, optimizer, train_dl, val_dl)

    per_epoch = math.ceil(len(train_dl) / args.accum)
    limit = args.max_steps or per_epoch * args.epochs
    done = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % 50 == 0:
                    logger.info("update %d loss %.4f", done, accelerator.gather(loss.detach()).mean().item())
            if done >= limit:
                break
        logger.info("epoch %d rougeLsum %.4f", epoch, generate_and_score(accelerator, model, tok, val_dl))
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained("t5-out", is_main_process=accelerator.is_main_process)
        if done >= limit:
            break


if __name__ == "__main__":
    main()
