"""One copy of the model's step per rank, its state replicated or sharded: ZeRO 0 to 3."""
