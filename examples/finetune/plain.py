"""Fine-tune a language model of transformers on one process: python plain.py"""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

STEPS, BATCH, PADDING = 6, 8, -100


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


def main(folder="finetuned"):
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    losses = []
    for batch in batches(0):
        total, count = loss_of(model(batch["input_ids"], batch["attention_mask"]), batch)
        loss = total / count
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        model.eval()
        sums = [loss_of(model(batch["input_ids"], batch["attention_mask"]), batch) for batch in batches(1)]
    losses.append(float(sum(total for total, _ in sums) / sum(count for _, count in sums)))
    model.save_pretrained(folder)
    print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    main()
