"""Packaging of hvlaunch; the tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (ROOT / "hvlaunch/__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None

TORCH = ["torch>=2.6"]  # the first that can abort all NCCL groups at once (_abort_process_group)
EXAMPLES = [*TORCH, "numpy", "scikit-learn"]
TEST = [
    *EXAMPLES,
    "hypothesis",
    "mpi4py>=4.1",
    "pytest<9.2",  # 9.2 hides xdist_group from pytest-xdist 3.8 (its issue 1386): all torch tests would run at once
    "pytest-timeout",
    "pytest-xdist",
    "uvloop>=0.19",
]
DEV = [
    *TEST,
    "codespell",
    "import-linter",
    "mypy",
    "ruff",
    "types-paramiko",
    "types-psutil",
    "vermin",
]

setup(
    name="hvlaunch",
    version=VERSION.group(1),
    description="Starts distributed PyTorch training on every machine that you can ssh into",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["hvlaunch", "hvlaunch.*"]),
    package_data={"hvlaunch": ["py.typed"]},
    install_requires=[
        "ClusterShell>=1.9.2",
        "httptools>=0.6",
        "paramiko>=5,<6",
        "prometheus-client>=0.20",
        "psutil>=5.9",
        "rich>=13",
        "rich-argparse>=1.4",
        "shtab>=1.7",
    ],
    extras_require={
        "uvloop": ["uvloop>=0.19"],
        "torch": TORCH,
        "examples": EXAMPLES,
        "test": TEST,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": [
            "hvlaunch = hvlaunch.cli.main:script",
            "hvlaunch-rendezvous = hvlaunch.cli.rendezvous:script",
        ],
        "torchrun.handlers": ["hvlaunch = hvlaunch.torchrun:handler"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
