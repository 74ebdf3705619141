from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased")
args = TrainingArguments(
    output_dir="out",
    learning_rate=2e-5,
    num_train_epochs=3,
    warmup_ratio=0.06,
    logging_nan_inf_filter=True,
    eval_strategy="epoch",
)
trainer = Trainer(model=model, args=args, train_dataset=train_set, eval_dataset=eval_set)
trainer.train()
