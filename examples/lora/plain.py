"""Fine-tune adapters of a language model with PEFT on one process: python plain.py"""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH = 6, 6


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


def main(folder="adapters"):
    model = build()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in batches():
        total, count = loss_of(model(input_ids=batch["input_ids"]), batch)
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    model.save_pretrained(folder)
    print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    main()
