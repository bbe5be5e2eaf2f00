"""How tensors travel between devices: threads, shared memory, gloo, NCCL and CUDA IPC, behind one protocol."""
