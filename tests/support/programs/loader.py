"""Data loaders whose workers multiply matrices: forked, spawned, and from a server."""

import torch
from torch.utils.data import DataLoader, Dataset


class Products(Dataset):
    """Samples that are computed."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        factor = torch.full((16, 16), float(index + 1))
        return factor @ factor


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        for batch in DataLoader(Products(), batch_size=4, num_workers=2, multiprocessing_context=method):
            print(method, f"{batch.std(0).mean():.4f}")
