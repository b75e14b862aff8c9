"""A complete run with Transformers' Trainer, which resumes: torchrun --nproc-per-node 2 ddp_trainer.py"""

import os

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import hvd_dyncomp.integrations.transformers

set_seed(0)
words = torch.randint(0, 8, (768, 8))
data = [{"input_ids": each, "labels": (each.sum() > 31).long()} for each in words]
config = LlamaConfig(
    vocab_size=9, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=8
)
args = TrainingArguments(
    "run",
    use_cpu=not torch.cuda.is_available(),
    num_train_epochs=4,
    learning_rate=1e-3,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    bf16=False,
    eval_strategy="epoch",
    logging_strategy="epoch",  # the controller's train_loss comes from the log
    save_strategy="epoch",
    ddp_find_unused_parameters=False,  # if the model uses all parameters
    ddp_bucket_cap_mb=8,
    report_to="none",
)
trainer = Trainer(
    LlamaForSequenceClassification(config),
    args,
    train_dataset=data[:512],
    eval_dataset=data[512:],
    compute_metrics=lambda seen: {"accuracy": (seen.predictions.argmax(1) == seen.label_ids).mean()},
)
compression = hvd_dyncomp.integrations.transformers.CompressionCallback(trainer, 4)
trainer.add_callback(compression)
# hvd_dyncomp.less_momentum(trainer.create_optimizer())  # 2 bits and less
trainer.train(resume_from_checkpoint=get_last_checkpoint("run") if os.path.isdir("run") else None)
if trainer.is_world_process_zero():
    print(f"{compression.quantizer.meter.total().saved_fraction:.0%} of the bytes saved")
