"""Train a Hugging Face causal language model with its Trainer."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import megaindex
from megaindex.loader import GPTDataset, MicroBatchSampler, collate

corpus = megaindex.IndexedDataset("my_corpus")
index = megaindex.build_index(corpus, sequence_length=128, epochs=1, order="epoch")


def for_the_model(samples: list) -> dict[str, torch.Tensor]:
    batch = collate(samples)
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
    # The labels are the next tokens already. The model would shift ``labels`` once more; its loss
    # reads ``shift_labels`` as they are, and needs ``labels`` to be there as well.
    return {"input_ids": batch["tokens"], "labels": labels, "shift_labels": labels}


class ExactTrainer(Trainer):
    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        # not through accelerator.prepare, which would divide the batches of each rank once more;
        # a resumed run skips the batches of the past without reading them
        sampler = MicroBatchSampler(
            num_samples=index.num_samples,
            micro_batch_size=self.args.per_device_train_batch_size,
            data_parallel_rank=self.args.process_index,
            data_parallel_size=self.args.world_size,
        )
        dataset = GPTDataset(index, corpus)
        return torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=for_the_model)


if __name__ == "__main__":
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
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
        save_strategy="no",
        disable_tqdm=True,
    )
    result = ExactTrainer(model=model, args=settings).train()
    print(f"{result.global_step} steps, loss {result.training_loss:.2f}")
