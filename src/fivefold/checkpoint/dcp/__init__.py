"""PyTorch's distributed checkpoints (DCP): `.metadata`, a pickle that says where the chunks of tensors lie, and files
of chunks, each written by `torch.save`. They are read by opcodes and never unpickled."""
