import argparse

import torch
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=10_000)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2000, args.max_steps)
    model.train()
    for i, batch in enumerate(make_loader()):
        loss = model(**batch).loss / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


if __name__ == "__main__":
    main()
