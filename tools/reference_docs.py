"""Writes docs/reference: the commands from their help, every key of an experiment file from the schema. `make docs`."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
import typer

from method_docs import table
from protofed.api.describe import settings_of, text_of
from protofed.cli.app import app
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.runs.compare import __doc__ as comparison_keys
from protofed.runs.config.sections import IN_TRAINING, EvaluationSettings, SavingSettings
from protofed.runs.observers import LoggingSettings
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.tasks import TASKS
from protofed.transforms.chain import UploadSettings
