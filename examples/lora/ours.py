"""Fine-tune adapters of a language model with PEFT, split over the ranks: python ours.py"""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import meshwise as mw

STEPS, BATCH = 6, 6
PLAN = "dp=2 zero=3"


def build():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, **shape))
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens = torch.randint(64, (BATCH, 9), generator=generator)
        yield {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss_of(output, batch):
    labels = batch["targets"].flatten()
    return cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum"), labels.numel()


def main(world, plan=PLAN, folder="adapters"):
    run = {"world": world, "loss": loss_of, "options": mw.Options(clip_norm=1.0, example=next(batches()))}
    trainer = mw.parallelize(build(), plan, optimizer=torch.optim.Adam, lr=1e-2, **run)
    losses = [trainer.step(batch).loss for batch in batches()]
    trainer.save_pretrained(folder)
    if world.rank == 0:
        print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    mw.run(2, main)
