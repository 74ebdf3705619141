import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification

from rte import encoded_split, collate


def train_epoch(model, loader, optimizer, device):
    model.train()
    total = 0.0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def evaluate(model, loader, device):
    correct = count = 0
    with torch.no_grad():
        for batch in loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            logits = model(**batch).logits
            correct += (logits.argmax(-1) == batch["labels"]).sum().item()
            count += batch["labels"].numel()
    return correct / count


def main():
    device = torch.device("cuda")
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    train_dl = DataLoader(encoded_split("train"), 16, shuffle=True, collate_fn=collate)
    dev_dl = DataLoader(encoded_split("validation"), 32, collate_fn=collate)
    for epoch in range(5):
        loss = train_epoch(model, train_dl, optimizer, device)
        print(f"epoch {epoch} loss {loss:.4f} dev accuracy {evaluate(model, dev_dl, device):.4f}")


if __name__ == "__main__":
    main()
