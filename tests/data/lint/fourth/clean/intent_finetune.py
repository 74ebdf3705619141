"""Fine-tune a small encoder for intent detection; half precision is used for inference only."""
import json
import logging

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer

log = logging.getLogger("intent")


class IntentSet(Dataset):
    def __init__(self, path, labels):
        self.rows = [json.loads(l) for l in open(path)]
        self.labels = {l: i for i, l in enumerate(labels)}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]["text"], self.labels[self.rows[i]["intent"]]


class Classifier(nn.Module):
    def __init__(self, name, n):
        super().__init__()
        self.body = AutoModel.from_pretrained(name)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(self.body.config.hidden_size, n)

    def forward(self, enc):
        h = self.body(**enc).last_hidden_state
        mask = enc["attention_mask"].unsqueeze(-1)
        return self.head(self.drop((h * mask).sum(1) / mask.sum(1)))


class Runner:
    def __init__(self, model, tok, device):
        self.model, self.tok, self.device = model.to(device), tok, device
        self.opt = torch.optim.AdamW([
            {"params": model.body.parameters(), "lr": 3e-5},
            {"params": model.head.parameters(), "lr": 1e-3},
        ], weight_decay=0.0)
        self.crit = nn.CrossEntropyLoss()

    def collate(self, rows):
        texts, ys = zip(*rows)
        return self.tok(list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt"), torch.tensor(ys)

    def fit_epoch(self, dl):
        self.model.train()
        for enc, y in dl:
            loss = self.crit(self.model(enc.to(self.device)), y.to(self.device))
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()

    @torch.inference_mode()
    def accuracy(self, dl):
        self.model.eval()
        hit = n = 0
        with torch.autocast("cuda", dtype=torch.float16):
            for enc, y in dl:
                hit += (self.model(enc.to(self.device)).argmax(-1).cpu() == y).sum().item()
                n += len(y)
        return hit / n


def main():
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(13)
    labels = json.load(open("labels.json"))
    name = "microsoft/MiniLM-L12-H384-uncased"
    r = Runner(Classifier(name, len(labels)), AutoTokenizer.from_pretrained(name), "cuda")
    train_set, val_set = IntentSet("train.jsonl", labels), IntentSet("val.jsonl", labels)
    train_dl = DataLoader(train_set, 32, shuffle=True, collate_fn=r.collate)
    train_probe_dl = DataLoader(train_set, 128, collate_fn=r.collate)
    val_dl = DataLoader(val_set, 128, collate_fn=r.collate)
    best, patience = 0.0, 3
    for epoch in range(15):
        r.fit_epoch(train_dl)
        train_acc, val_acc = r.accuracy(train_probe_dl), r.accuracy(val_dl)
        log.info("epoch %d train %.4f val %.4f gap %.4f", epoch, train_acc, val_acc, train_acc - val_acc)
        if val_acc > best:
            best, patience = val_acc, 3
            torch.save(r.model.state_dict(), "intent.pt")
        else:
            patience -= 1
            if patience == 0:
                break
    r.model.load_state_dict(torch.load("intent.pt"))
    r.model.half().eval()
    with torch.inference_mode():
        probs = r.model(r.tok(["turn the lights off"], return_tensors="pt").to("cuda")).float().softmax(-1)
    log.info("demo: %s %.3f", labels[probs.argmax().item()], probs.max().item())


if __name__ == "__main__":
    main()
