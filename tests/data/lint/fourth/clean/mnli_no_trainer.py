import argparse
import math

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_scheduler


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model_name_or_path", default="roberta-base")
    p.add_argument("--per_device_batch_size", type=int, default=16)
    p.add_argument("--learning_rate", type=float, default=2e-5)
    p.add_argument("--weight_decay", type=float, default=0.01)
    p.add_argument("--num_train_epochs", type=int, default=3)
    p.add_argument("--gradient_accumulation_steps", type=int, default=4)
    p.add_argument("--num_warmup_steps", type=int, default=1000)
    p.add_argument("--output_dir", default="mnli")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    raw = load_dataset("glue", "mnli")
    tok = AutoTokenizer.from_pretrained(args.model_name_or_path)
    with accelerator.main_process_first():
        ds = raw.map(lambda e: tok(e["premise"], e["hypothesis"], truncation=True, max_length=256), batched=True,
                     remove_columns=["premise", "hypothesis", "idx"])
    ds = ds.rename_column("label", "labels")
    coll = DataCollatorWithPadding(tok, pad_to_multiple_of=8)
    train_dl = DataLoader(ds["train"], shuffle=True, collate_fn=coll, batch_size=args.per_device_batch_size)
    eval_dl = DataLoader(ds["validation_matched"], collate_fn=coll, batch_size=64)

    model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, num_labels=3)
    skip = ("bias", "LayerNorm.weight", "embeddings")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(s in n for s in skip)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in model.named_parameters() if any(s in n for s in skip)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98))
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    updates = math.ceil(len(train_dl) / args.gradient_accumulation_steps)
    max_steps = args.num_train_epochs * updates
    # the prepared scheduler advances num_processes times per optimizer update
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
                                 num_training_steps=max_steps * accelerator.num_processes)
    lr_scheduler = accelerator.prepare(lr_scheduler)
    metric = evaluate.load("accuracy")
    bar = tqdm(range(max_steps), disable=not accelerator.is_local_main_process)

    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    bar.update(1)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        for batch in eval_dl:
            with torch.no_grad():
                logits = model(**batch).logits
            preds, refs = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            metric.add_batch(predictions=preds, references=refs)
        accelerator.print(f"epoch {epoch}: {metric.compute()}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(args.output_dir, is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    main()
