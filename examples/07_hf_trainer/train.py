"""Train a small Llama with the Trainer of Transformers, at O2 of fp8stack.

    PYTHONPATH=examples python examples/07_hf_trainer/train.py --output runs/trainer --resume

It takes all GPUs of a host with `torchrun --nproc-per-node`, and DeepSpeed with `--deepspeed ds_config.json`.
"""

import argparse

import corpus
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp8stack.integrations.transformers import fp8_trainer

SEQ_LEN = 256


class Windows(torch.utils.data.Dataset):
    """A text, cut into windows."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) // SEQ_LEN

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.text[index * SEQ_LEN : (index + 1) * SEQ_LEN].long()
        return {"input_ids": tokens, "labels": tokens}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes, **heads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a process")
    parser.add_argument("--data", help="a text file or folder; Python's own library without it")
    parser.add_argument("--output", default="runs/trainer", help="a folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
    parser.add_argument("--deepspeed", help="a DeepSpeed configuration")
    args = parser.parse_args()
    training = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=3e-3,
        weight_decay=0.1,
        bf16=True,
        logging_steps=10,
        save_steps=args.steps,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        deepspeed=args.deepspeed,
    )
    data = Windows(corpus.load(args.data, SEQ_LEN).train)
    trainer = fp8_trainer(Trainer, "O2")(model=build(), args=training, train_dataset=data)
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
