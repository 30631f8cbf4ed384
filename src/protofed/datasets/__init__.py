"""DATASETS: every published set of data by name."""

from protofed.datasets import cifar, digits, folders, syn, syn_rendered
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
        folders.OFFICE_CALTECH10,
        folders.PACS,
        folders.VLCS,
        folders.TINY_IMAGENET,
        folders.VIREOFOOD172,
    )
}
