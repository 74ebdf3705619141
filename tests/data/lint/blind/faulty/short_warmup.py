import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, get_linear_schedule_with_warmup

from summaries import SummaryDataset, make_collate, rouge


def evaluate(model, tok, loader, device):
    model.eval()
    hyps, refs = [], []
    with torch.no_grad():
        for batch in loader:
            ids = model.generate(batch["input_ids"].to(device), max_new_tokens=64)
            hyps += tok.batch_decode(ids, skip_special_tokens=True)
            refs += batch["reference"]
    return rouge(hyps, refs)


def main():
    device = "cuda"
    tok = AutoTokenizer.from_pretrained("google/t5-v1_1-base")
    model = AutoModelForSeq2SeqLM.from_pretrained("google/t5-v1_1-base").to(device)
    collate = make_collate(tok)
    train_dl = DataLoader(SummaryDataset("train"), 16, shuffle=True, collate_fn=collate)
    dev_dl = DataLoader(SummaryDataset("dev"), 16, collate_fn=collate)
    epochs = 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=5, num_training_steps=epochs * len(train_dl))
    for epoch in range(epochs):
        model.train()
        for step, batch in enumerate(train_dl):
            out = model(input_ids=batch["input_ids"].to(device), labels=batch["labels"].to(device))
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 100 == 0:
                print(epoch, step, out.loss.item())
        print("rouge", evaluate(model, tok, dev_dl, device))


if __name__ == "__main__":
    main()
