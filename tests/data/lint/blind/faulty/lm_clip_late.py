import torch
import torch.nn as nn

from wikitext import Corpus, windows
from transformer import DecoderLM


class LMTrainer:
    def __init__(self, corpus, d_model=512, lr=3e-4):
        self.corpus = corpus
        self.model = DecoderLM(len(corpus.vocab), d_model).cuda()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.1)
        self.ce = nn.CrossEntropyLoss()
        self.step = 0

    def loss(self, x, y):
        logits = self.model(x.cuda())
        return self.ce(logits.flatten(0, 1), y.cuda().flatten())

    def fit_epoch(self):
        self.model.train()
        for x, y in windows(self.corpus.train, 256, 16, shuffle=True):
            loss = self.loss(x, y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.step += 1
            if self.step % 200 == 0:
                print(f"step {self.step} loss {loss.item():.3f} grad {norm.item():.2f}")

    @torch.no_grad()
    def perplexity(self):
        self.model.eval()
        losses = [self.loss(x, y).item() for x, y in windows(self.corpus.valid, 256, 16)]
        return torch.tensor(losses).mean().exp().item()


if __name__ == "__main__":
    trainer = LMTrainer(Corpus("wikitext-103"))
    for epoch in range(4):
        trainer.fit_epoch()
        print("valid ppl", trainer.perplexity())
