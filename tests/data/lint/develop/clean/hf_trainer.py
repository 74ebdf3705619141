import numpy as np
from transformers import AutoModelForTokenClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed


def compute_metrics(p):
    predictions, labels = p
    predictions = np.argmax(predictions, axis=2)
    return {"accuracy": float((predictions == labels)[labels != -100].mean())}


def main():
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    model = AutoModelForTokenClassification.from_pretrained("bert-base-cased", num_labels=9)
    train, dev = datasets(tokenizer)
    args = TrainingArguments(
        output_dir="ner",
        per_device_train_batch_size=16,
        learning_rate=3e-5,
        warmup_ratio=0.1,
        weight_decay=0.01,
        bf16=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=dev, compute_metrics=compute_metrics)
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    main()
