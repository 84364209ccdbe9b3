"""Fine-tune a language model of transformers under a plan: python ours.py"""

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import meshwise as mw

STEPS, BATCH, PADDING = 6, 8, -100
PLAN = "dp=2 zero=3"


def build():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, **shape))


def batches(first):
    generator = torch.Generator().manual_seed(first)
    for _ in range(STEPS):
        tokens = torch.randint(64, (BATCH, 12), generator=generator)
        lengths = torch.randint(4, 12, (BATCH, 1), generator=generator)
        there = torch.arange(12) < lengths
        labels = torch.where(there, tokens, PADDING).roll(-1, 1)
        labels[:, -1] = PADDING
        yield {"input_ids": tokens, "attention_mask": there.long(), "targets": labels}


def loss_of(output, batch):
    labels = batch["targets"]
    total = cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction="sum")
    return total, (labels != PADDING).sum()


def main(world, plan=PLAN, folder="finetuned"):
    run = {"world": world, "loss": loss_of, "options": mw.Options(clip_norm=1.0, example=next(batches(0)))}
    trainer = mw.parallelize(build(), plan, optimizer=torch.optim.Adam, lr=3e-3, **run)
    scheduler = get_cosine_schedule_with_warmup(trainer.optimizer, 2, STEPS)
    losses = []
    for batch in batches(0):
        losses.append(trainer.step(batch).loss)
        scheduler.step()
    losses.append(trainer.evaluate(batches(1)).loss)
    trainer.save_pretrained(folder)
    if world.rank == 0:
        print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    mw.run(2, main)
