"""Train with the recipe of NeMo Automodel, on the samples of a lock."""

from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

import megaindex.adapters.automodel

config = {  # its YAML, without a dataset
    "step_scheduler": {
        "global_batch_size": 4,
        "local_batch_size": 4,
        "ckpt_every_steps": 10,
        "num_epochs": 1,  # the order holds all epochs of the data
    },
    "dist_env": {"backend": "gloo"},
    "distributed": {"strategy": "ddp"},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "torch_dtype": "float32",
        "config": {
            "_target_": "transformers.LlamaConfig",
            "vocab_size": 257,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    },
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
    "checkpoint": {"enabled": True, "checkpoint_dir": "automodel-output"},
}
recipe = TrainFinetuneRecipeForNextTokenPrediction(ConfigNode(config))
megaindex.adapters.automodel.attach(recipe, "run.lock")  # of `megaindex lock`
recipe.setup()
recipe.run_train_validation_loop()
loader = recipe.dataloader.run
print(f"{loader.returned} steps to sample {loader.consumed_samples}")
