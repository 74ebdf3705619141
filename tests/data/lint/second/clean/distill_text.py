import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification

from dataset import IntentDataset, pad_batch


class StudentCNN(nn.Module):
    def __init__(self, vocab_size, num_labels, width=128):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, width, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, k, padding=k // 2) for k in (3, 5, 7))
        self.bn = nn.BatchNorm1d(3 * width)
        self.fc = nn.Linear(3 * width, num_labels)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        x = torch.cat([F.relu(c(x)).amax(-1) for c in self.convs], dim=1)
        return self.fc(F.dropout(self.bn(x), 0.3, self.training))


def distillation_loss(student_logits, teacher_logits, labels, T=4.0, alpha=0.7):
    soft_targets = F.softmax(teacher_logits / T, dim=-1)
    log_student = F.log_softmax(student_logits / T, dim=-1)
    soft = F.kl_div(log_student, soft_targets, reduction="batchmean") * T * T
    hard = F.cross_entropy(student_logits, labels)
    return alpha * soft + (1 - alpha) * hard


def run_validation(student, loader, device):
    student.eval()
    correct, confidence, n = 0, 0.0, 0
    with torch.no_grad():
        for batch in loader:
            logits = student(batch["input_ids"].to(device))
            probs = F.softmax(logits, dim=-1)
            conf, pred = probs.max(-1)
            correct += (pred == batch["labels"].to(device)).sum().item()
            confidence += conf.sum().item()
            n += len(pred)
    return correct / n, confidence / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher", default="checkpoints/intent-bert")
    ap.add_argument("--epochs", type=int, default=25)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_loader = DataLoader(IntentDataset("train"), 128, shuffle=True, collate_fn=pad_batch)
    val_loader = DataLoader(IntentDataset("dev"), 256, collate_fn=pad_batch)

    teacher = AutoModelForSequenceClassification.from_pretrained(args.teacher).to(device).half()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = StudentCNN(30522, teacher.config.num_labels).to(device)
    opt = torch.optim.Adam(student.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[15, 20], gamma=0.1)

    best = 0.0
    for epoch in range(args.epochs):
        student.train()
        for batch in train_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.no_grad():
                t_logits = teacher(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
            s_logits = student(batch["input_ids"])
            loss = distillation_loss(s_logits, t_logits, batch["labels"])
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        acc, conf = run_validation(student, val_loader, device)
        print(f"epoch {epoch} acc {acc:.4f} mean confidence {conf:.3f}")
        if acc > best:
            best = acc
            torch.save(student.state_dict(), "student.pt")


if __name__ == "__main__":
    main()
