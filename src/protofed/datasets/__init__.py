"""DATASETS: all published datasets by name."""

from protofed.datasets import (
    cifar,
    digits,
    office_caltech10,
    pacs,
    syn,
    syn_rendered,
    tiny_imagenet,
    vireofood172,
    vlcs,
)
from protofed.datasets.examples import Dataset

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        digits.MNIST,
        digits.FASHION_MNIST,
        digits.USPS,
        digits.SVHN,
        syn.SYN,
        syn.MNIST_M,
        syn_rendered.DATASET,
        cifar.CIFAR10,
        cifar.CIFAR100,
        office_caltech10.OFFICE_CALTECH10,
        pacs.PACS,
        vlcs.VLCS,
        tiny_imagenet.TINY_IMAGENET,
        vireofood172.VIREOFOOD172,
    )
}
