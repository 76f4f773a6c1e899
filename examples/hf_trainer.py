"""Train a Hugging Face causal language model with its Trainer, on the samples of a lock."""

import sys

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import megaindex.adapters.huggingface

if __name__ == "__main__":
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    settings = TrainingArguments(
        output_dir="hf-output",
        per_device_train_batch_size=4,
        num_train_epochs=1,  # the order holds all epochs of the data
        learning_rate=0.01,
        use_cpu=True,
        report_to="none",
        save_steps=10,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings)
    megaindex.adapters.huggingface.attach(trainer, "run.lock")  # of `megaindex lock`
    result = trainer.train(resume_from_checkpoint="resume" in sys.argv)
    print(f"{result.global_step} steps, loss {result.training_loss:.2f}")
