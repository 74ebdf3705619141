import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification

checkpoint = "distilbert-base-cased"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
raw = load_dataset("conll2003")
label_names = raw["train"].features["ner_tags"].feature.names


def tokenize_and_align(examples):
    enc = tokenizer(examples["tokens"], truncation=True, is_split_into_words=True)
    labels = []
    for i, tags in enumerate(examples["ner_tags"]):
        prev, row = None, []
        for w in enc.word_ids(batch_index=i):
            row.append(-100 if w is None or w == prev else tags[w])
            prev = w
        labels.append(row)
    enc["labels"] = labels
    return enc


data = raw.map(tokenize_and_align, batched=True, remove_columns=raw["train"].column_names)
collator = DataCollatorForTokenClassification(tokenizer)
train_loader = DataLoader(data["train"], batch_size=16, shuffle=True, collate_fn=collator)
eval_loader = DataLoader(data["validation"], batch_size=32, collate_fn=collator)

model = AutoModelForTokenClassification.from_pretrained(checkpoint, num_labels=len(label_names))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

for epoch in range(3):
    model.train()
    total = 0
    for step, batch in enumerate(train_loader):
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        total += loss.item()
        if step % 100 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    print("mean train loss", total / len(train_loader))

    model.eval()
    correct, count = 0, 0
    with torch.no_grad():
        for batch in eval_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            logits = model(**batch).logits
            mask = batch["labels"] != -100
            correct += (logits.argmax(-1)[mask] == batch["labels"][mask]).sum().item()
            count += mask.sum().item()
    print(f"epoch {epoch} token accuracy {correct / count:.4f}")

model.save_pretrained("ner-model")
tokenizer.save_pretrained("ner-model")
