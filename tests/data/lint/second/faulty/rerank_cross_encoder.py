import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

from msmarco import QueryPassagePairs, DevQueries


class CrossEncoder(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.lm = AutoModel.from_pretrained(name)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(self.lm.config.hidden_size, 1))

    def forward(self, enc):
        return self.head(self.lm(**enc).last_hidden_state[:, 0]).squeeze(-1)


class RerankTrainer:
    amp_dtype = torch.bfloat16

    def __init__(self, name="microsoft/MiniLM-L12-H384-uncased", lr=3e-5, epochs=2):
        self.device = torch.device("cuda")
        self.tok = AutoTokenizer.from_pretrained(name)
        self.net = CrossEncoder(name).to(self.device)
        self.crit = nn.BCEWithLogitsLoss()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")
        self.epochs = epochs

    def encode(self, q, p):
        return self.tok(list(q), list(p), padding=True, truncation="only_second", max_length=256,
                        return_tensors="pt").to(self.device)

    def forward_loss(self, q, p, y):
        with torch.autocast("cuda", dtype=self.amp_dtype):
            scores = self.net(self.encode(q, p))
        return self.crit(scores.float(), y.float().to(self.device))

    def fit(self, loader, dev):
        for epoch in range(self.epochs):
            self.net.train()
            for step, (q, p, y) in enumerate(loader):
                loss = self.forward_loss(q, p, y)
                self.opt.zero_grad(set_to_none=True)
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.opt)
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                self.scaler.step(self.opt)
                self.scaler.update()
                if step % 200 == 0:
                    print(f"{epoch}:{step} {loss.item():.4f}")
            print(f"epoch {epoch} MRR@10 {self.mrr(dev):.4f}")
            torch.save(self.net.state_dict(), "rerank.pt")

    @torch.inference_mode()
    def mrr(self, dev):
        self.net.eval()
        total = 0.0
        for query, passages, gold in dev:
            with torch.autocast("cuda", dtype=self.amp_dtype):
                s = self.net(self.encode([query] * len(passages), passages))
            order = s.float().argsort(descending=True)[:10].tolist()
            total += 1 / (order.index(gold) + 1) if gold in order else 0.0
        return total / len(dev)


if __name__ == "__main__":
    torch.manual_seed(2)
    trainer = RerankTrainer()
    trainer.fit(DataLoader(QueryPassagePairs("train"), 32, shuffle=True), DevQueries("dev.small"))
