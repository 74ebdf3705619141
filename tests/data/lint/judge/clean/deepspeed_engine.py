import argparse

import deepspeed
import torch


def main():
    parser = argparse.ArgumentParser()
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    model, dataset, val_loader = build()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=dataset
    )
    for epoch in range(3):
        engine.train()
        for batch in loader:
            loss = engine(batch["x"].to(engine.device), batch["y"].to(engine.device))
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint("out", tag=f"epoch{epoch}")
        engine.eval()
        with torch.no_grad():
            total = sum(engine(b["x"], b["y"]).item() for b in val_loader)
        print(epoch, total / len(val_loader))


main()
